"""The Wan configs."""

import dataclasses

import pytest
from flax.traverse_util import flatten_dict
from training_runs import ROOT, line_of, run_here

from alload_jax.config import read_config
from alload_jax.models.families import abstract_model, parameter_count
from alload_jax.training.parameters import split_parameters


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
    """Counts of diffusers' meta-device models; tests/parity/test_models_parity.py checks them."""
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
