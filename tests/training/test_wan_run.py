"""train.py on text data, from weights in diffusers' format; and the Wan configs."""

import dataclasses

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file
from training_runs import ROOT, TEXT_MODEL, WEIGHTS, Runs, line_of, run_here

from alload_jax.commands.model_source import find_run
from alload_jax.config import read_config
from alload_jax.data.store import StoreWriter
from alload_jax.models.families import abstract_model, parameter_count
from alload_jax.training.parameters import split_parameters
from alload_jax.training.restore import one_device_mesh


class WanRuns(Runs):
    def tiny(self):
        config = super().tiny()
        config["model"] = dict(TEXT_MODEL)
        config["run"] |= {"steps": 4, "initial_weights": str(WEIGHTS)}
        config["objective"] = {"condition_dropout": 0.5}
        del config["sampling"]
        return config


@pytest.fixture
def wan(tmp_path):
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "data", vae_stride=(1, 1, 1)) as writer:
        for n in range(12):
            size = ((1, 4, 4), (2, 4, 8))[n % 2]
            text = rng.normal(size=(n % 7 + 1, 10)).astype(np.float32)
            writer.add(rng.normal(size=(*size, 4)).astype(np.float32), text, size)
    return WanRuns(tmp_path, tmp_path / "data")


@pytest.mark.slow
def test_a_run_starts_from_the_weights_and_changes_them_slowly(wan):
    slow = ("--optimizer.learning_rate", "1e-6", "--run.steps")
    wan.finish(*slow, "3")
    assert all(np.isfinite(row["loss"]) for row in wan.metrics())
    golden = load_file(WEIGHTS / "diffusion_pytorch_model.safetensors")
    found = find_run(wan.folder / "run", "raw").values(one_device_mesh())["head"]["out"]["kernel"]
    distance = np.abs(np.asarray(found).T - golden["proj_out.weight"]).max()
    assert 0 < distance < 1e-5
    assert "weights: checkpoint of step" in wan.finish(*slow, "4").stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model.num_layers", "3"), "model.num_layers is 3, but 2 there"),
        (("--run.initial_weights", "/no/such"), "/no/such: no such file or folder"),
        (("--model.text.length", "2"), "has a text of 7 tokens"),
        (("--model.text", "null"), "model.text is null"),
        (("--model.text.dim", "0"), "model.text.dim is 0"),
    ],
)
def test_mismatches_are_reported_in_one_line(wan, flags, words):
    assert words in wan.refused(*flags)
    assert not (wan.folder / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("wan2_1_t2v_1_3b", 1_418_996_800),
        ("wan2_1_t2v_14b", 14_288_491_584),
        ("wan2_1_i2v_14b", 16_394_878_784),
        ("wan2_2_ti2v_5b", 4_999_787_712),
    ],
)
def test_wan_configs_have_the_parameters_that_diffusers_has(name, count):
    """Counts of diffusers' meta-device models; tests/parity/test_wan_parity.py checks them."""
    config = read_config(["--config", str(ROOT / "configs" / f"{name}.yaml")])
    assert parameter_count(config.model) == count


@pytest.mark.parametrize("name", ["wan2_1_t2v_1_3b", "wan2_1_t2v_14b", "wan2_1_i2v_14b"])
def test_configs_of_adapters_train_adapters_of_the_same_model(name):
    full, lora = (
        read_config(["--config", str(ROOT / "configs" / f"{name}{end}.yaml")])
        for end in ("", "_lora")
    )
    assert parameter_count(dataclasses.replace(lora.model, lora=None)) == parameter_count(
        full.model
    )
    trained, frozen = split_parameters(abstract_model(lora.model).params, lora.parameters)
    layers = [path for path in flatten_dict(frozen, sep="/") if path.endswith("kernel")]
    adapted = {path.rpartition("/")[0] for path in flatten_dict(trained, sep="/")}
    assert adapted == {path.rpartition("/")[0] for path in layers if path.startswith("blocks/")}
    assert lora.parameters.frozen_dtype == "bfloat16"


def test_wan_configs_without_data_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run_here("--config", str(ROOT / "configs" / "wan2_1_t2v_14b.yaml"))
    assert "set data.folder" in line_of(ended)
    assert not list(tmp_path.iterdir())
