"""What people add from outside: each plug point is used here without touching the package."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from grain_ramps import RampRecords
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pooling import PoolingConfig
from scaled_silu import scaled_silu

from alload_jax import cli
from alload_jax.config import read_config
from alload_jax.data.store import StoreWriter
from alload_jax.errors import InputError
from alload_jax.models.families import abstract_model
from alload_jax.models.weights import load_weights
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.restore import find_step, restore_weights

BUCKETED = {"policy": "equal_tokens", "ranks": 1, "micro_batches_per_step": 8}
INDEPENDENT = {"ranks_mode": "independent", "ranks": 2, "micro_batches_per_step": 4}
LAYOUTS = {"bucketed": BUCKETED, "packed": BUCKETED | {"policy": "balanced"}}
LAYOUTS["independent"] = BUCKETED | INDEPENDENT


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def restored(folder):
    """The model's values at the end of a run, by name."""
    config = read_config(["--config", str(folder / "config.yaml")])
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    step = find_step(folder / "checkpoints")
    found = restore_weights(
        folder / "checkpoints", step, config.model, config.parameters, mesh, "raw"
    )
    return {
        name: {key: np.asarray(leaf) for key, leaf in flatten_dict(part, sep="/").items()}
        for name, part in found._asdict().items()
    }


GRID = {"frames": 1, "height": 4, "width": 4, "rows": 1}
GROUPS = [{"parameters": ["predictor"], "learning_rate": 1e-6, "weight_decay": 0.0}]
OF_LORA = [{"parameters": ["lora"]}]


def test_what_comes_from_outside_trains_draws_and_resumes_bit_for_bit(train, tmp_path, capsys):
    """A family, a data set that is made by its name, an evaluator and a callback."""
    made = {"folder": str(tmp_path / "made"), "dataset": {"name": "ramps", "count": 24}}
    parts = {"callbacks": [{"name": "count", "every": 4}], "optimizer": {"groups": GROUPS}}
    parts |= {"sampling": {"grids": [GRID]}, "evaluators": [{"name": "mean_brightness"}]}
    folder = train(data=made, **parts)
    assert "writing ramps to" in capsys.readouterr().out
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # What layers hand out reaches the log.
    assert all(row["predictor_loss"] > 0 and row["mean_square"] > 0 for row in rows)
    assert (folder / "samples" / "step_0000006" / "1x4x4.png").is_file()
    summary = json.loads((folder / "summary.json").read_text())
    assert np.isfinite(summary["mean_brightness"])
    steps = [["step", number] for number in range(6)]
    calls = [["start", 0], *steps[:4], ["act", 4, 4], *steps[4:], ["stop", 6], ["finish", 6]]
    assert json.loads((folder / "count.json").read_text()) == calls
    values = restored(folder)
    assert (values["variables"]["blocks/mean_square"] > 0).all()
    for step in (4, 6):
        shutil.rmtree(folder / "checkpoints" / str(step))
    (folder / "summary.json").unlink()
    # Another data set or optimizer is not that of the run.
    other = {"folder": made["folder"], "dataset": {"name": "ramps", "count": 9}}
    for changes, words in (
        ({"data": other}, r"holds data of another data\.dataset"),
        ({"optimizer": {}}, "checkpoint of another optimizer: groups was"),
        ({"optimizer": {"groups": [{"parameters": ["hidden"]}]}}, "another optimizer: groups was"),
    ):
        with pytest.raises(InputError, match=words):
            train(**({"data": made} | parts | changes))
    train(data=made, **parts)
    again = metrics(folder)
    for name in ("loss", "grad_norm", "predictor_loss", "mean_square"):
        assert [row[name] for row in again] == [row[name] for row in rows]
    jax.tree.map(np.testing.assert_array_equal, restored(folder), values)


@pytest.mark.slow
def test_layouts_of_a_family_from_outside_agree(train):
    """Auxiliary sums add up over micro-batches, ranks and shape groups as the loss does."""
    found = []
    for name, planning in LAYOUTS.items():
        # All samples in one step, whatever the layout.
        options = {"run": {"steps": 1}, "objective": {"condition_dropout": 0.0}}
        devices = 2 if name == "independent" else 1
        folder = train(folder=name, devices=devices, planning=planning, **options)
        (row,) = metrics(folder)
        assert row["samples"] == 24
        variables = restored(folder)["variables"]["blocks/mean_square"]
        found.append([row["loss"], row["predictor_loss"], row["mean_square"], *variables])
    for layout in found[1:]:
        np.testing.assert_allclose(layout, found[0], rtol=1e-4)


@pytest.mark.slow
def test_a_family_from_outside_is_exported_and_drawn_from_its_folder(train, tmp_path, monkeypatch):
    folder = train(run={"steps": 1})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "--checkpoint", str(folder), "--out", "out"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["_class_name"] == "PoolingModel"
    size = ["--frames", "1", "--height", "4", "--width", "4", "--class", "2"]
    for place in (str(folder), "out"):
        command = ["sample", "--checkpoint", place, *size, "--steps", "2", "--shift", "1"]
        out = ["--out", f"{len(place)}.safetensors", "--guidance", "1", "--sampler", "euler"]
        assert cli.main([*command, *out, "--vae-stride", "1", "1", "1"]) == 0
    drawn = [path.read_bytes()[-64:] for path in tmp_path.glob("*.safetensors")]
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]
    model = PoolingConfig(num_classes=4)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(InputError, match="does not fit the model"):
        load_weights(tmp_path / "out", PoolingConfig(num_classes=5), mesh)
    loaded = load_weights(tmp_path / "out", model, mesh)
    assert jax.tree.structure(loaded) == jax.tree.structure(abstract_model(model).params)


def test_a_family_from_outside_is_planned_for_without_its_code(capsys):
    command = ["plan", "--workload", "wan-480p", "--size", "100", "--model", "pooling-small"]
    assert cli.main([*command, "--m-mem", "66816", "--ranks", "2", "--policy", "balanced"]) == 0
    assert "pooling-small on NVIDIA H200" in capsys.readouterr().out


@pytest.mark.slow
def test_an_objective_and_a_second_optimizer_reach_what_they_are_for_alone(train):
    """The objective adds a loss from inside layers, which only predictors see."""
    heavy = {"objective": {"name": "half_velocity", "predictor_weight": 50.0}, "run": {"steps": 3}}
    light = heavy | {"objective": {"name": "half_velocity", "predictor_weight": 0.5}}
    optimizer = {"clip_norm": 1e9}
    runs = (("base", light, {}), ("still", light, {"groups": GROUPS}), ("weighed", heavy, {}))
    folders = (train(folder=n, optimizer=optimizer | more, **changes) for n, changes, more in runs)
    base, still, weighed = (restored(folder)["params"] for folder in folders)
    for name in base:
        own = "predictor" in name
        assert own or np.array_equal(base[name], weighed[name]), name
        # Two programs, which may round differently; at the other learning rate nothing is close.
        assert np.allclose(still[name], base[name], rtol=1e-5, atol=1e-7) == (not own), name


@pytest.mark.slow
def test_only_parameters_that_match_a_pattern_are_trained_also_when_resumed(train):
    parameters = {"trained": ["blocks/"], "frozen": ["predictor"], "frozen_dtype": "bfloat16"}
    begin = train(folder="begin", run={"steps": 1}, optimizer={"learning_rate": 1e-12})
    folder = train(folder="frozen", run={"steps": 2}, parameters=parameters)
    train("--run.steps", "4", folder="frozen", parameters=parameters)
    assert len(metrics(folder)) == 4
    with pytest.raises(InputError, match="checkpoint of another parameters"):
        train("--run.steps", "8", folder="frozen")
    start, end = restored(begin)["params"], restored(folder)
    assert all("blocks/" in name and "predictor" not in name for name in end["params"])
    assert set(end["params"]) | set(end["frozen"]) == set(start)
    for name, value in end["frozen"].items():
        assert value.dtype == jax.numpy.bfloat16
        np.testing.assert_allclose(value.astype(np.float32), start[name], rtol=1e-2, atol=1e-9)
    assert not any(np.array_equal(value, start[name]) for name, value in end["params"].items())
    # No gradient, moment or average of what is frozen.
    stored = (folder / "checkpoints" / "4" / "state" / "_METADATA").read_text()
    keys = [key for key in stored.split("(") if "predictor" in key or "classes" in key]
    assert keys
    assert all(key.startswith("'frozen'") for key in keys)


def of_source(name):
    return {"folder": "unused", "source": {"name": name}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"parameters": {"trained": ["lora"]}}, r"parameters.trained: 'lora' matches no parameter"),
        ({"parameters": {"frozen": ["."]}}, "leaves nothing of parameters.trained"),
        ({"parameters": {"trained": ["("]}}, "is not a regular expression"),
        ({"optimizer": {"groups": OF_LORA}}, r"optimizer.groups: parameters: 'lora' matches no"),
        (
            {"parameters": {"frozen": ["predictor"]}, "optimizer": {"groups": GROUPS}},
            "'predictor' matches no trained parameter",
        ),
        ({"data": of_source("grain_ramps:Missing")}, "cannot be imported"),
        ({"data": of_source("no_such_module:Class")}, "cannot be imported"),
        (
            {"data": of_source("ramps")},
            "one of store, parquet, musubi, safetensors, or give module",
        ),
        ({"data": of_source("store") | {"dataset": {"name": "ramps"}}}, "data.source and data.da"),
        ({"data": {"folder": "s3://b/x", "dataset": {"name": "ramps"}}}, "folder of this machine"),
    ],
)
def test_parts_that_cannot_be_meant_are_refused(sections, words, train):
    with pytest.raises(InputError, match=words):
        train(**sections)
    assert ParametersConfig().identity() == {}


def write_records(folder, count):
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for record in map(RampRecords(count).__getitem__, range(count)):
            clip = np.moveaxis(record["clip"], 0, -1)
            writer.add(clip, np.array([record["direction"]]), clip.shape[:3])


@pytest.mark.slow
def test_a_grain_source_from_outside_trains_as_the_same_samples_in_a_store(train, tmp_path):
    """By threads and by processes; the config that the run wrote reads the same samples again."""

    def losses(folder):
        return [row["loss"] for row in metrics(folder)]

    write_records(tmp_path / "data", 12)
    source = {"name": "grain_ramps:GrainRamps", "count": 12}
    read = {"folder": "unused", "source": source}
    stored = train(data={"folder": str(tmp_path / "data")}, run={"steps": 3}, folder="stored")
    by_processes = read | {"loader": {"processes": 2}}
    outside = train(data=by_processes, run={"steps": 3}, folder="outside")
    assert losses(outside) == losses(stored)
    train("--run.steps", "4", data=read, folder="outside")
    assert len(losses(outside)) == 4
    fewer = {"folder": "unused", "source": source | {"count": 9}}
    with pytest.raises(InputError, match="was trained on 12 samples"):
        train("--run.steps", "5", data=fewer, folder="outside")


@pytest.mark.slow
def test_a_stream_trains_and_goes_on_as_if_never_interrupted(train):
    """By threads and by processes."""
    read = {"folder": "unused", "source": {"name": "grain_ramps:RampStream"}}
    settings = {"planning": {"policy": "balanced"}, "optimizer": {"schedule": "constant"}}
    auto = settings | {"planning": {"policy": "auto"}}  # which takes the same
    whole = train(data=read, run={"steps": 4}, folder="whole", **auto)
    train(data=read, run={"steps": 2}, folder="parts", **settings)
    by_processes = read | {"loader": {"processes": 2}}
    parts = train("--run.steps", "4", data=by_processes, folder="parts", **settings)
    assert [row["loss"] for row in metrics(parts)] == [row["loss"] for row in metrics(whole)]
    jax.tree.map(np.testing.assert_array_equal, restored(whole), restored(parts))


@pytest.mark.slow
def test_bad_samples_of_a_stream_are_left_out_and_named_by_their_keys(train):
    source = {"name": "grain_ramps:RampStream", "huge": True}
    read = {"folder": "unused", "source": source, "loader": {"max_bad_records": 99}}
    folder = train(data=read, planning={"policy": "balanced"})
    assert all(np.isfinite(row["loss"]) for row in metrics(folder))
    lines = (folder / "bad_records.txt").read_text().splitlines()
    keys = [int(re.search("stream: sample (.*) gives a loss", line)[1]) for line in lines]
    assert keys
    assert {key % 100 for key in keys} == {5}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"planning": {"policy": "sorted"}}, "a stream, which balanced alone plans"),
        ({"run": {"steps": None, "epochs": 2}}, "run.epochs is 2, but data.source is a stream"),
        ({"data": {"exclude": "few.txt"}}, "data.exclude is few.txt, but data.source is a stream"),
        ({"validation": {"share": 0.1}}, "give validation.folder"),
    ],
)
def test_what_a_stream_has_not_is_refused(sections, words, train):
    read = {"folder": "unused", "source": {"name": "grain_ramps:RampStream"}}
    with pytest.raises(InputError, match=words):
        train(**sections | {"data": read | sections.get("data", {})})


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    x, given = (jax.random.normal(key, (2, 4, 128)) for key in keys[:2])
    return x, jax.random.normal(keys[2], (128,)), given


@pytest.mark.parametrize("split", [False, True])
def test_its_kernels_compute_what_its_reference_means(split, arrays):
    """And sum its vector's gradient over a mesh."""

    def gradients(x, scale, given, **options):
        out, pull = jax.vjp(lambda *operands: scaled_silu(*operands, **options), x, scale)
        return out, *pull(given)

    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", "context")) if split else None
    run = jax.jit(lambda *given: gradients(*given, interpret=True, sharding=sharding))
    for found, wanted in zip(run(*arrays), gradients(*arrays, implementation="xla"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_it_cannot_do_is_said(arrays):
    with pytest.raises(NotImplementedError, match=r"scaled_silu: 'triton' cannot run, the backend"):
        scaled_silu(*arrays[:2], implementation="triton")
    with pytest.raises(ValueError, match="choose one of auto, triton, xla"):
        scaled_silu(*arrays[:2], implementation="mosaic")

    def twice(x):
        return jax.grad(lambda each: scaled_silu(each, arrays[1], interpret=True).sum())(x).sum()

    with pytest.raises(NotImplementedError, match="scaled_silu: the kernels differentiate once"):
        jax.grad(twice)(arrays[0])


def test_auto_takes_the_reference_where_nothing_is_faster(arrays):
    text = jax.jit(scaled_silu).lower(*(jnp.asarray(each) for each in arrays[:2])).as_text()
    assert "triton" not in text
