"""Runs of train.py that train adapters beside frozen weights in a folder."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import yaml
from flax.traverse_util import flatten_dict
from training_runs import TEXT_MODEL, WEIGHTS, computed, forget_last, run_here

from alload_jax.cli import main as alload
from alload_jax.commands.model_source import find_run
from alload_jax.data.store import StoreWriter
from alload_jax.errors import InputError
from alload_jax.models.common.stored import quantise
from alload_jax.models.families import read_model_config
from alload_jax.models.lora_files import read_lora
from alload_jax.models.weights import load_weights
from alload_jax.training.restore import one_device_mesh


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "data"
    rng = np.random.default_rng(0)
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for n in range(12):
            text = rng.normal(size=(n % 7 + 1, 10)).astype(np.float32)
            writer.add(rng.normal(size=(1, 4, 4, 4)).astype(np.float32), text, (1, 4, 4))
    return folder


@pytest.fixture
def told(tmp_path, data, monkeypatch):
    """Runs train.py in this process; changes are sections of the config."""
    monkeypatch.chdir(tmp_path)

    def run(*flags, folder="run", **changes):
        config = {
            "run": {"folder": folder, "steps": 4, "initial_weights": str(WEIGHTS)},
            "data": {"folder": str(data)},
            "planning": {"policy": "equal_tokens", "m_mem": 16},
            "model": TEXT_MODEL | {"lora": {"rank": 4}},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 0},
            "checkpoint": {"every": 2},
        }
        for section, values in changes.items():
            config[section] = config.get(section, {}) | values
        Path("config.yaml").write_text(yaml.safe_dump(config))
        return run_here("--config", "config.yaml", *flags)

    return run


@pytest.fixture
def train(told, tmp_path):
    """Runs to the end; returns the run's folder."""

    def run(*flags, folder="run", **changes):
        finished = told(*flags, folder=folder, **changes)
        assert finished.returncode == 0, finished.stderr
        run.said = finished.stderr
        return tmp_path / folder

    return run


@pytest.fixture
def refused(told):
    """Runs what must be refused in one line; returns the line."""

    def run(**changes):
        ended = told(**changes)
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
        return ended.stderr

    return run


def values_of(folder, weights="raw"):
    values = find_run(folder, weights).values(one_device_mesh())
    return {name: jax.tree.map(np.asarray, part) for name, part in flatten(values).items()}


def flatten(tree):
    return flatten_dict(tree, sep="/")


def released():
    config = read_model_config(WEIGHTS / "config.json")
    return flatten(load_weights(WEIGHTS, config, one_device_mesh()))


def test_adapters_are_trained_beside_weights_that_checkpoints_leave_out(train):
    folder = train()
    found = values_of(folder)
    for name, value in released().items():
        np.testing.assert_array_equal(found[name], np.asarray(value.astype("bfloat16")))
    assert all(found[name].any() for name in found if name.endswith("lora_up"))
    stored = (folder / "checkpoints" / "4" / "state" / "_METADATA").read_text()
    assert "lora_down" in stored
    assert "frozen" not in stored
    assert "kernel" not in stored


@pytest.mark.slow
def test_other_frozen_weights_than_the_runs_are_refused(train, refused, tmp_path):
    other = tmp_path / "weights"
    shutil.copytree(WEIGHTS, other)
    train(run={"initial_weights": str(other), "steps": 2})
    file = other / "diffusion_pytorch_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40
    file.write_bytes(content)
    assert "these are other weights than those that the run was" in refused(
        run={"initial_weights": str(other)}
    )
    said = refused(run={"initial_weights": None})
    assert "initial_weights is null, but the run was trained on" in said
    said = refused(model={"lora": {"rank": 8}})
    assert "another model: of lora, rank was 4 and is now 8" in said


@pytest.mark.slow
def test_a_continued_run_is_the_run_that_was_never_stopped(train):
    """With weights in float8 and dropout."""
    changes = {
        "model": {"lora": {"rank": 4, "dropout": 0.3}},
        "parameters": {"frozen_dtype": "float8"},
    }
    folder = train(**changes)
    config = find_run(folder).config
    kernel = released()["blocks/feed_forward/hidden/kernel"]
    found = find_run(folder).values(one_device_mesh())["blocks"]["feed_forward"]["hidden"]
    for name, value in quantise(kernel).items():
        np.testing.assert_array_equal(getattr(found["kernel"], name), value)
    assert config.lora.dropout == 0.3
    longer = train(folder="longer", **changes)
    forget_last(longer, 4)
    train(folder="longer", **changes)
    assert computed(longer) == computed(folder)
    again = values_of(longer)
    for name, value in values_of(folder).items():
        jax.tree.map(np.testing.assert_array_equal, again[name], value)
    none = train(folder="none", parameters={"frozen_dtype": "float8"})
    assert computed(none) != computed(folder)


@pytest.mark.slow
def test_random_weights_are_stored_because_no_folder_has_them(train):
    folder = train(run={"initial_weights": None})
    assert "frozen" in (folder / "checkpoints" / "4" / "state" / "_METADATA").read_text()
    before = computed(folder)
    train("--run.steps", "6", run={"initial_weights": None})
    assert computed(folder)[:4] == before


@pytest.mark.slow
def test_adapters_are_exported_merged_sampled_and_trained_further(train, tmp_path, capsys):
    folder = train()
    assert alload(["lora", "export", "--checkpoint", str(folder), "--out", "x.safetensors"]) == 0
    keys = ["--keys", "original", "--out", "y.safetensors"]
    assert alload(["lora", "convert", "x.safetensors", "--model", str(WEIGHTS), *keys]) == 0
    assert alload(["export", "--checkpoint", str(folder), "--out", "full"]) == 0
    merge = ["lora", "merge", "--model", str(WEIGHTS), "--lora", "y.safetensors:1.0"]
    assert alload([*merge, "--out", "merged", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "20 adapters of rank 4 from step 4, 40 tensors" in printed
    assert f"they belong to {WEIGHTS}" in printed
    assert "texts were padded to 7 tokens" in printed

    rng = np.random.default_rng(0)
    text = rng.normal(size=(7, 10)).astype(np.float32)
    safetensors.numpy.save_file({"text": text}, "text.safetensors")
    shape = ["--frames", "1", "--height", "4", "--width", "4", "--vae-stride", "1", "1", "1"]
    same = ["--prompt-embeds", "text.safetensors", "--guidance", "1", "--steps", "3", *shape]
    same += ["--sampler", "euler", "--shift", "1", "--dtype", "float32"]

    def drawn(name, *source):
        assert alload(["sample", *source, *same, "--out", f"{name}.safetensors"]) == 0
        return safetensors.numpy.load_file(f"{name}.safetensors")["latents"]

    run = drawn("a", "--checkpoint", str(folder))
    added = drawn("b", "--checkpoint", str(WEIGHTS), "--lora", "y.safetensors")
    merged = drawn("c", "--checkpoint", "merged")
    plain = drawn("d", "--checkpoint", str(WEIGHTS))
    halves = ["--lora", "x.safetensors:0.25", "y.safetensors:0.75"]
    twice = drawn("e", "--checkpoint", str(WEIGHTS), *halves)
    np.testing.assert_allclose(added, merged, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(added, twice, rtol=1e-4, atol=1e-5)
    assert np.abs(added - plain).max() > 1e-2
    # Exported weights are those of the run, rounded to bfloat16; texts are padded as in training.
    np.testing.assert_allclose(run, drawn("f", "--checkpoint", "full"), rtol=1e-3, atol=1e-4)
    assert np.abs(run - added).max() < 0.2 * np.abs(run - plain).max()

    first = values_of(folder, "ema")
    rate = {"learning_rate": 1e-12}
    begun = {"initial_lora": "x.safetensors", "steps": 1}
    further = train(folder="same", run=begun, optimizer=rate)
    for name, value in values_of(further).items():
        np.testing.assert_allclose(value, first[name], atol=1e-6)


@pytest.mark.slow
def test_a_run_is_a_place_of_initial_weights(train, refused):
    folder = train()
    rate = {"learning_rate": 1e-12}
    # The same adapters go on; others begin beside weights that hold them.
    first = values_of(folder, "ema")
    same = train(folder="same", run={"initial_weights": str(folder), "steps": 1}, optimizer=rate)
    for name, value in values_of(same).items():
        np.testing.assert_allclose(value, first[name], atol=1e-6)
    changes = {"run": {"initial_weights": str(folder), "steps": 1}, "optimizer": rate}
    full = train(folder="full", **changes, model={"lora": None})
    merged = values_of(full)
    assert not any("lora" in name for name in merged)
    down, up = (first[f"blocks/self_attention/query/lora_{part}"] for part in ("down", "up"))
    kernel = first["blocks/self_attention/query/kernel"].astype(np.float32) + down @ up
    np.testing.assert_allclose(
        merged["blocks/self_attention/query/kernel"], kernel, rtol=1e-5, atol=1e-6
    )
    # The first run may go on and remove the checkpoint that others began from.
    other = train(folder="other", **changes, model={"lora": {"rank": 2}})
    before = values_of(other)
    shutil.rmtree(folder)
    again = values_of(other)
    assert before.keys() == again.keys()
    folder = train()
    said = refused(folder="wrong", **changes, model={"num_layers": 3, "lora": None})
    assert "weights of another architecture" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": {"frozen": ["lora_down"]}}, "lora_down and 9 more untr"),
        ({"parameters": {"trained": ["norm"]}}, "untrained; add"),
        ({"run": {"initial_weights": "nowhere"}}, "nowhere: no such file or folder"),
        ({"run": {"initial_lora": "nowhere.safetensors"}}, "nowhere.safetensors: cannot be read"),
        ({"model": {"lora": None}, "run": {"initial_lora": "x"}}, "but model.lora is null"),
        ({"validation": {"folder": "nowhere"}}, "set validation.folder to a prepared"),
    ],
)
def test_what_cannot_be_meant_is_refused(refused, changes, words):
    assert words in refused(**changes)


@pytest.mark.slow
def test_a_base_that_has_moved_is_named(train, refused, data, tmp_path, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(WEIGHTS, tmp_path / "base")
    folder = train(run={"initial_weights": "base", "steps": 1})
    (tmp_path / "base").rename(moved)
    with pytest.raises(InputError, match="base: the weights that the run was trained on are not"):
        values_of(folder)
    export = ["export", "--checkpoint", str(folder), "--out", "full"]
    assert alload([*export, "--base", str(moved)]) == 0
    assert alload(["lora", "export", "--checkpoint", str(folder), "--out", "x.safetensors"]) == 0
    merge = ["lora", "merge", "--model", str(folder), "--lora", "x.safetensors:0.5"]
    assert alload([*merge, "--base", str(moved), "--out", "merged"]) == 0
    said = refused(folder="other", run={"initial_weights": "x.safetensors", "steps": 1})
    assert "holds adapters (LoRA), not weights" in said
    train(
        folder="norms",
        run={"initial_weights": str(moved), "steps": 1},
        parameters={"trained": ["/lora_(down|up)$", "norm"]},
    )
    capsys.readouterr()
    assert alload(["lora", "export", "--checkpoint", "norms", "--out", "y.safetensors"]) == 0
    assert "more are trained too, which a file of adapters cannot hold" in capsys.readouterr().err
    # Samples to validate on that are trained on are told.
    same = {"folder": str(data)}
    train(folder="both", run={"initial_weights": str(moved), "steps": 1}, validation=same)
    assert "12 of 12 samples of validation.folder are also trained on" in train.said


@pytest.mark.slow
def test_a_run_without_a_moving_average_samples_from_its_weights(train, refused):
    average = {"optimizer": {"ema_decay": None}}
    folder = train(**average)
    assert "'ema'" not in (folder / "checkpoints" / "4" / "state" / "_METADATA").read_text()
    names = ("loss", "grad_norm")
    averaged = computed(train(folder="averaged"), names)  # by another program
    np.testing.assert_allclose(computed(folder, names), averaged, rtol=1e-6)
    assert alload(["lora", "export", "--checkpoint", str(folder), "--out", "x.safetensors"]) == 0
    adapters = read_lora("x.safetensors", find_run(folder).config).adapters
    up = values_of(folder)["blocks/self_attention/query/lora_up"]
    np.testing.assert_array_equal(adapters["blocks/self_attention/query/kernel", 1].up, up[1])
    with pytest.raises(InputError, match="keeps no moving average"):
        find_run(folder, "ema")
    assert "checkpoint of another optimizer: without_ema was True" in refused()
    train("--run.steps", "6", **average)
    train(folder="next", run={"initial_weights": str(folder), "steps": 1}, **average)


@pytest.mark.slow
def test_a_model_of_classes_moves_to_other_data_and_classes(runs):
    shape = {"dim": 16, "ffn_dim": 16, "num_heads": 2, "num_layers": 1, "freq_dim": 8}

    def train(name, mix, m_mem, run=None, **changes):
        dataset = {"name": "digits", "frames_per_latent": 1, "mix": [mix]}
        content = {
            "run": {"folder": name, "steps": 2} | (run or {}),
            "data": {"folder": f"data-{name}", "dataset": dataset},
            "planning": {"policy": "equal_tokens", "m_mem": m_mem},
            "model": shape | {"patch_size": [1, 4, 4]} | changes,
            "optimizer": {"learning_rate": 1e-12, "warmup_steps": 0},
            "sampling": {"grids": []},
        }
        runs.config.write_text(yaml.safe_dump(content))
        return runs.here()

    begun = {"run": {"initial_weights": "first"}, "num_classes": 12}
    assert train("first", [1, 8, 8, 20], 16).returncode == 0
    refused = train("random", [1, 16, 16, 12], 64, **begun, lora={"rank": 2})
    assert "parameters freezes it, so that it would stay random" in refused.stderr
    done = train("second", [1, 16, 16, 12], 64, **begun)
    assert "condition_embedding/table begins anew" in done.stdout
    first, second = (values_of(runs.folder / name) for name in ("first", "second"))
    anew = {name for name, value in second.items() if value.shape != first[name].shape}
    assert len(anew) == 1
    for name in second.keys() - anew:
        np.testing.assert_allclose(second[name], first[name], atol=1e-6)
