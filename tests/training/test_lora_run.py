"""Runs of train.py that train weights of a folder, or adapters beside them."""

import contextlib
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from flax.traverse_util import flatten_dict
from layouts import normal, write_samples
from safetensors.numpy import load_file, save_file
from training_runs import (
    TEXT_MODEL,
    WEIGHTS,
    Sections,
    computed,
    forget_last,
    metrics_of,
    run_here,
)

from alload_jax.cli import main as alload
from alload_jax.commands.model_source import find_run
from alload_jax.errors import InputError
from alload_jax.models.common.stored import quantise
from alload_jax.models.families import read_model_config
from alload_jax.models.lora_files import read_lora
from alload_jax.models.weights import load_weights
from alload_jax.training.restore import one_device_mesh

STILL = {"learning_rate": 1e-12}
"""So that a run keeps the weights that it begins with."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    def sample(rng, n):
        return (1, 4, 4), normal(rng, n % 7 + 1, 10), {}

    folder = tmp_path_factory.mktemp("lora") / "data"
    origin = {"text": {"name": "bytes", "width": 10, "length": 7}}
    write_samples(folder, 12, sample, channels=4, origin=origin)
    return folder


@pytest.fixture(scope="module")
def sections(data):
    return Sections(
        run={"steps": 4, "initial_weights": str(WEIGHTS)},
        data={"folder": str(data)},
        planning={"policy": "equal_tokens", "m_mem": 16},
        model=TEXT_MODEL | {"lora": {"rank": 4}},
        optimizer={"learning_rate": 0.01, "warmup_steps": 0},
        checkpoint={"every": 2},
    )


@pytest.fixture
def lora(tmp_path, sections, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return sections


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sections):
    """A run of this config."""
    with contextlib.chdir(tmp_path_factory.mktemp("finished")):
        return sections.train()


@pytest.fixture
def folder(lora, finished):
    """A copy of it in this folder."""
    return shutil.copytree(finished, Path("run").absolute())


def values_of(folder, weights="raw"):
    values = flatten_dict(find_run(folder, weights).values(one_device_mesh()), sep="/")
    return {name: jax.tree.map(np.asarray, part) for name, part in values.items()}


def assert_same_values(found, expected, atol=0.0):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol)


def released(folder=WEIGHTS):
    config = read_model_config(folder / "config.json")
    return flatten_dict(load_weights(folder, config, one_device_mesh()), sep="/")


def stored(folder):
    return (folder / "checkpoints" / "4" / "state" / "_METADATA").read_text()


def test_adapters_are_trained_beside_weights_that_checkpoints_leave_out(finished):
    found = values_of(finished)
    for name, value in released().items():
        np.testing.assert_array_equal(found[name], np.asarray(value.astype("bfloat16")))
    assert all(found[name].any() for name in found if name.endswith("lora_up"))
    assert "lora_down" in stored(finished)
    assert "frozen" not in stored(finished)
    assert "kernel" not in stored(finished)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": {"frozen": ["lora_down"]}}, "lora_down and 9 more untr"),
        ({"parameters": {"trained": ["norm"]}}, "untrained; add"),
        ({"run": {"initial_weights": "nowhere"}}, "nowhere: no such file or folder"),
        ({"run": {"initial_lora": "nowhere.safetensors"}}, "nowhere.safetensors: cannot be read"),
        ({"model": {"lora": None}, "run": {"initial_lora": "x"}}, "but model.lora is null"),
        ({"validation": {"folder": "nowhere"}}, "set validation.folder to a prepared"),
        ({"model": {"num_layers": 3}}, "model.num_layers is 3, but 2 there"),
        ({"model": {"text": {"dim": 0, "length": 7}}}, "model.text.dim is 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(lora, changes, words):
    assert words in lora.refused(**changes)
    assert not Path("run/config.yaml").exists()


@pytest.mark.slow
def test_a_run_starts_from_the_weights_and_changes_them_slowly(lora):
    changes = {"model": {"lora": None}, "optimizer": {"learning_rate": 1e-6}}
    folder = lora.train(**changes)
    assert all(np.isfinite(row["loss"]) for row in metrics_of(folder))
    golden = load_file(WEIGHTS / "diffusion_pytorch_model.safetensors")["proj_out.weight"]
    distance = np.abs(values_of(folder)["head/out/kernel"].T - golden).max()
    assert 0 < distance < 1e-5


@pytest.mark.slow
def test_a_continued_run_is_the_run_that_was_never_stopped(lora):
    """With weights in float8 and dropout; or with random ones, which no folder has."""
    low = {"parameters": {"frozen_dtype": "float8"}}
    changes = {"model": {"lora": {"rank": 4, "dropout": 0.3}}} | low
    folder = lora.train(**changes)
    kernel = released()["blocks/feed_forward/hidden/kernel"]
    found = find_run(folder).values(one_device_mesh())["blocks"]["feed_forward"]["hidden"]
    for name, value in quantise(kernel).items():
        np.testing.assert_array_equal(getattr(found["kernel"], name), value)
    assert find_run(folder).config.lora.dropout == 0.3
    expected, values = computed(folder), values_of(folder)
    forget_last(folder, 4)
    lora.train(**changes)
    assert computed(folder) == expected
    jax.tree.map(np.testing.assert_array_equal, values_of(folder), values)
    assert computed(lora.train(folder="none", **low)) != expected

    anew = {"run": {"initial_weights": None}, "folder": "random"}
    drawn = lora.train(**anew)
    assert "frozen" in stored(drawn)
    before = computed(drawn)
    lora.train("--run.steps", "6", **anew)
    assert computed(drawn)[:4] == before


@pytest.mark.slow
def test_frozen_weights_that_are_others_or_have_moved_are_named(lora, data, capsys):
    moved = {"run": {"initial_weights": "moved", "steps": 1}}
    shutil.copytree(WEIGHTS, "base")
    folder = lora.train(run={"initial_weights": "base", "steps": 1})
    said = lora.refused(run={"initial_weights": None})
    assert "initial_weights is null, but the run was trained on" in said
    said = lora.refused(run={"initial_weights": "base"}, model={"lora": {"rank": 8}})
    assert "another model: of lora, rank was 4 and is now 8" in said
    shutil.move("base", "moved")
    with pytest.raises(InputError, match="base: the weights that the run was trained on are not"):
        values_of(folder)
    export = ["export", "--checkpoint", str(folder), "--out", "full"]
    assert alload([*export, "--base", "moved"]) == 0
    assert alload(["lora", "export", "--checkpoint", str(folder), "--out", "x.safetensors"]) == 0
    merge = ["lora", "merge", "--model", str(folder), "--lora", "x.safetensors:0.5"]
    assert alload([*merge, "--base", "moved", "--out", "merged"]) == 0
    said = lora.refused(folder="other", run={"initial_weights": "x.safetensors", "steps": 1})
    assert "holds adapters (LoRA), not weights" in said
    lora.train(folder="norms", **moved, parameters={"trained": ["/lora_(down|up)$", "norm"]})
    capsys.readouterr()
    assert alload(["lora", "export", "--checkpoint", "norms", "--out", "y.safetensors"]) == 0
    assert "more are trained too, which a file of adapters cannot hold" in capsys.readouterr().err
    lora.train(folder="both", **moved, validation={"folder": str(data)})
    assert "12 of 12 samples of validation.folder are also trained on" in lora.said
    shutil.copytree(WEIGHTS, "base")
    with open("base/diffusion_pytorch_model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 0x40]))
    said = lora.refused(run={"initial_weights": "base"})
    assert "these are other weights than those that the run was" in said


@pytest.mark.slow
def test_adapters_are_exported_merged_and_trained_further(lora, folder, capsys):
    assert alload(["lora", "export", "--checkpoint", str(folder), "--out", "x.safetensors"]) == 0
    keys = ["--keys", "original", "--out", "y.safetensors"]
    assert alload(["lora", "convert", "x.safetensors", "--model", str(WEIGHTS), *keys]) == 0
    printed = capsys.readouterr().out
    assert "20 adapters of rank 4 from step 4, 40 tensors" in printed
    assert f"they belong to {WEIGHTS}" in printed
    assert "texts were padded to 7 tokens" in printed

    def merged(*adapters, out):
        merge = ["lora", "merge", "--model", str(WEIGHTS), "--lora", *adapters]
        assert alload([*merge, "--out", out, "--dtype", "float32"]) == 0
        return released(Path(out))

    full = ["export", "--checkpoint", str(folder), "--out", "full", "--dtype", "float32"]
    assert alload(full) == 0
    added = merged("y.safetensors", out="added")
    twice = merged("x.safetensors:0.25", "y.safetensors:0.75", out="twice")
    assert_same_values(twice, added, atol=1e-6)
    run, plain = released(Path("full")), released()
    assert max(np.abs(added[name] - value).max() for name, value in plain.items()) > 1e-2
    for name, value in added.items():  # the run's frozen weights are rounded to bfloat16
        np.testing.assert_allclose(run[name], value, rtol=2**-7, atol=1e-4)

    begun = {"initial_lora": "x.safetensors", "steps": 1}
    assert "begin anew" not in lora.told(folder="same", run=begun, optimizer=STILL).stdout
    first = values_of(folder, "ema")
    assert_same_values(values_of(Path("same")), first, atol=1e-6)


@pytest.mark.slow
def test_a_run_is_a_place_of_initial_weights(lora, folder):
    changes = {"run": {"initial_weights": str(folder), "steps": 1}, "optimizer": STILL}
    # The same adapters go on; others begin beside weights that hold them.
    first = values_of(folder, "ema")
    assert_same_values(values_of(lora.train(folder="same", **changes)), first, atol=1e-6)
    merged = values_of(lora.train(folder="full", **changes, model={"lora": None}))
    assert not any("lora" in name for name in merged)
    down, up = (first[f"blocks/self_attention/query/lora_{part}"] for part in ("down", "up"))
    name = "blocks/self_attention/query/kernel"
    kernel = first[name].astype(np.float32) + down @ up
    np.testing.assert_allclose(merged[name], kernel, rtol=1e-5, atol=1e-6)
    said = lora.refused(folder="wrong", **changes, model={"num_layers": 3, "lora": None})
    assert "weights of another architecture" in said
    # The first run may go on and remove the checkpoint that others began from.
    other = lora.train(folder="other", **changes, model={"lora": {"rank": 2}})
    before = values_of(other)
    shutil.rmtree(folder)
    assert before.keys() == values_of(other).keys()


@pytest.mark.slow
def test_a_run_without_a_moving_average_samples_from_its_weights(lora, finished):
    average = {"optimizer": {"ema_decay": None}}
    folder = lora.train(**average)
    assert "'ema'" not in stored(folder)
    names = ("loss", "grad_norm")
    averaged = computed(finished, names)  # by another program
    np.testing.assert_allclose(computed(folder, names), averaged, rtol=1e-6)
    assert alload(["lora", "export", "--checkpoint", str(folder), "--out", "x.safetensors"]) == 0
    adapters = read_lora("x.safetensors", find_run(folder).config).adapters
    up = values_of(folder)["blocks/self_attention/query/lora_up"]
    np.testing.assert_array_equal(adapters["blocks/self_attention/query/kernel", 1].up, up[1])
    with pytest.raises(InputError, match="keeps no moving average"):
        find_run(folder, "ema")
    assert "checkpoint of another optimizer: ema_decay was null and is now 'set'" in lora.refused()
    lora.train("--run.steps", "6", **average)
    lora.train(folder="next", run={"initial_weights": str(folder), "steps": 1}, **average)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_frozen_weights_in_the_hosts_memory_train_the_same_adapters(lora, dtype):
    """A continued run, too; XLA rounds elsewhere where weights arrive by copies."""
    fields = {
        "parameters": {"frozen_dtype": dtype},
        "model": {"lora": {"rank": 4, "dora": dtype == "bfloat16"}, "remat": "offload"},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 0, "schedule": "constant"},
    }
    folder = lora.train(folder="device", **fields)
    fields["parameters"]["frozen_memory"] = "host"
    lora.train("--run.steps", "2", folder="host", **fields)
    swapped = lora.train(folder="host", **fields)
    names = ("loss", "grad_norm")
    np.testing.assert_allclose(computed(swapped, names), computed(folder, names), rtol=1e-6)
    adapters = {name: value for name, value in values_of(folder).items() if "lora" in name}
    assert_same_values(values_of(swapped), adapters, atol=1e-5)
    assert alload(["export", "--checkpoint", str(swapped), "--out", "merged"]) == 0


@pytest.mark.slow
def test_a_model_of_classes_moves_to_other_data_and_classes(runs):
    def train(name, mix, m_mem, run=None, **changes):
        content = runs.tiny()
        content["run"] |= {"folder": name, "steps": 2} | (run or {})
        dataset = {"name": "digits", "frames_per_latent": 1, "mix": [mix]}
        content["data"] = {"folder": f"data-{name}", "dataset": dataset}
        content["planning"] = {"policy": "equal_tokens", "m_mem": m_mem}
        content["model"] |= changes
        content["optimizer"] |= STILL
        runs.config.write_text(yaml.safe_dump(content | {"sampling": {"grids": []}}))
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
    assert_same_values(second, {name: first[name] for name in first.keys() - anew}, atol=1e-6)


@pytest.mark.slow
def test_two_experts_are_two_runs_that_are_drawn_merged_and_continued_as_one(lora):
    shutil.copytree(WEIGHTS, "WAN/transformer")
    other = {key: value + 0.1 for key, value in load_file(next(WEIGHTS.glob("*.safe*"))).items()}
    shutil.copytree(WEIGHTS, "WAN/transformer_2")
    save_file(other, "WAN/transformer_2/diffusion_pytorch_model.safetensors")
    Path("WAN/model_index.json").write_text('{"boundary_ratio": 0.6}')
    alone = {"run": {"initial_weights": None}, "optimizer": {"ema_decay": None}}
    prompt = {"prompt": "a cat", "frames": 1, "height": 4, "width": 4}
    alone |= {"validation": {"share": 0.4, "noise_levels": [0.3, 0.8]}}
    alone |= {"sampling": {"steps": 6, "guidance": 1.0, "prompts": [prompt]}}
    weights = {"high_noise": "WAN/transformer", "low_noise": "WAN/transformer_2"}
    both = alone | {"experts": {"boundary": 0.6} | weights}
    folder = lora.train(**both)
    for name, key, level in zip(weights, ("lowest", "highest"), (0.8, 0.3), strict=True):
        own = {"run": {"initial_weights": weights[name]}, "sampling": {"prompts": []}}
        own |= {"objective": {"timesteps": {key: 0.6}}}
        single = lora.train(folder=f"alone/{name}", **(alone | own))
        assert computed(folder / name) == computed(single)
        levels = {key for row in metrics_of(folder / name) for key in row if "sigma" in key}
        assert levels == {f"validation/loss/sigma_{level}"}
    before = computed(folder / "low_noise")
    forget_last(folder / "low_noise", 4)
    assert run_here("--config", "run/config.yaml").returncode == 0
    assert computed(folder / "low_noise") == before

    moved = run_here("--config", "run/config.yaml", "--experts.boundary", "0.7")
    assert "is 0.7, but run/high_noise was trained with 0.6" in moved.stderr
    one = ("--run.initial_weights", "WAN/transformer", "--run.folder")
    plain = run_here("--config", "run/config.yaml", "--experts", "null", *one, "run")
    assert "run: two experts were trained there" in plain.stderr
    both = run_here("--config", "run/config.yaml", "--run.folder", "alone/high_noise")
    assert "alone/high_noise: one model was trained there" in both.stderr
    export = ["lora", "export", "--checkpoint", "run", "--out", "x.safetensors"]
    (folder / "low_noise").rename("later")
    with pytest.raises(InputError, match="low_noise: is not there, so that the second expert"):
        alload(export)
    assert not Path("x_high_noise.safetensors").exists()
    Path("later").rename(folder / "low_noise")
    Path("x_low_noise.safetensors").touch()
    with pytest.raises(InputError, match=r"x_low_noise\.safetensors: exists already"):
        alload(export)
    assert not Path("x_high_noise.safetensors").exists()
    assert alload([*export, "--force"]) == 0
    convert = ["lora", "convert", "x.safetensors", "--model", "WAN", "--keys", "original"]
    assert alload([*convert, "--out", "y.safetensors"]) == 0
    merge = ["lora", "merge", "--model", "WAN", "--lora", "y.safetensors", "--out", "merged"]
    assert alload([*merge, "--dtype", "float32"]) == 0
    full = ["export", "--checkpoint", "run", "--out", "full"]
    Path("full/transformer_2/x").mkdir(parents=True)
    with pytest.raises(InputError, match="transformer_2: exists already"):
        alload(full)
    assert not Path("full/transformer").exists()
    Path("full/transformer_2/x").rmdir()
    assert alload(full) == 0
    flags = ["--frames", "1", "--height", "4", "--width", "4", "--vae-stride", "1", "1", "1"]
    flags += ["--guidance", "1", "--steps", "6", "--shift", "1", "--dtype", "float32"]
    flags += ["--prompt-embeds", "text.safetensors", "--force", "--out", "a.safetensors"]
    text = np.random.default_rng(0).normal(size=(7, 10)).astype(np.float32)
    save_file({"text": text}, "text.safetensors")

    def drawn(*source):
        assert alload(["sample", "--checkpoint", *source, *flags]) == 0
        return load_file("a.safetensors")["latents"]

    run, added = drawn("run"), drawn("WAN", "--lora", "y.safetensors")
    merged = drawn("merged", "--boundary", "0.6")
    np.testing.assert_allclose(merged, added, rtol=1e-4, atol=1e-5)
    full, of_two = ["full"], ["full/transformer", "--low-noise-checkpoint", "full/transformer_2"]
    full, of_two = (drawn(*source, "--boundary", "0.6") for source in (full, of_two))
    np.testing.assert_allclose(full, run, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(of_two, full)
    assert np.abs(run - drawn("run/high_noise")).max() > 1e-2
    place = flags.index("--prompt-embeds")
    flags[place : place + 2] = ["--prompt", "a cat"]
    preview = load_file("run/low_noise/samples/step_0000004/prompt_0.safetensors")["latents"]
    np.testing.assert_allclose(preview, drawn("run"), rtol=1e-4, atol=1e-5)
    first = load_file("run/high_noise/samples/step_0000004/prompt_0.safetensors")["latents"]
    assert np.isfinite(first).all()
    assert np.abs(first - preview).max() > 1e-2


def test_experts_that_cannot_be_meant_are_refused(lora):
    none, base = {"run": {"initial_weights": None}}, str(WEIGHTS)
    for experts, changes, words in (
        (
            {},
            {},
            "run.initial_weights is given beside experts; leave it out for experts.high_noise",
        ),
        ({"boundary": 1.0}, none, "experts.boundary is 1.0; it must be between 0 and 1"),
        ({}, none | {"objective": {"timesteps": {"highest": 0.5}}}, "timesteps is given beside"),
        ({"high_noise": base, "low_noise": "s3://x"}, none, "experts.low_noise is s3://x; it must"),
        ({"high_noise": base}, none, "experts.low_noise is null, so that only one expert has"),
        # Before the first one is trained.
        (
            {"high_noise": base, "low_noise": "x"},
            none,
            "experts.low_noise is x, which is not there",
        ),
        ({"high_noise": "x", "low_noise": base}, none, "x: no such file"),
    ):
        assert words in lora.refused(**changes, experts={"boundary": 0.9} | experts)
