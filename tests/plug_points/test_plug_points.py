"""What people add from outside: each plug point is used here without touching the package."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from alload_jax import cli
from alload_jax.errors import InputError
from alload_jax.models.families import abstract_model
from alload_jax.models.weights import load_weights
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.restore import find_step, restore_weights

LAYOUTS = {
    "bucketed": {"policy": "equal_tokens", "ranks": 1, "micro_batches_per_step": 8},
    "packed": {"policy": "balanced", "ranks": 1, "micro_batches_per_step": 8},
    "independent": {
        "policy": "equal_tokens",
        "ranks_mode": "independent",
        "ranks": 2,
        "micro_batches_per_step": 4,
    },
}


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def restored(folder):
    """The model's values at the end of a run, by name."""
    from alload_jax.config import read_config

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


def test_a_family_from_outside_trains_draws_and_resumes_bit_for_bit(train):
    folder = train(sampling={"grids": [GRID]}, evaluators=[{"name": "mean_brightness"}])
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # What layers hand out reaches the log.
    assert all(row["predictor_loss"] > 0 and row["mean_square"] > 0 for row in rows)
    assert (folder / "samples" / "step_0000006" / "1x4x4.png").is_file()
    summary = json.loads((folder / "summary.json").read_text())
    assert np.isfinite(summary["mean_brightness"])
    values = restored(folder)
    assert (values["variables"]["blocks/mean_square"] > 0).all()
    for step in (4, 6):
        shutil.rmtree(folder / "checkpoints" / str(step))
    (folder / "summary.json").unlink()
    train()
    again = metrics(folder)
    for name in ("loss", "grad_norm", "predictor_loss", "mean_square"):
        assert [row[name] for row in again] == [row[name] for row in rows]
    for part, found in restored(folder).items():
        for name, value in found.items():
            np.testing.assert_array_equal(value, values[part][name])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "independent"])
def test_layouts_of_a_family_from_outside_agree(layout, train):
    """Auxiliary sums add up over micro-batches, ranks and shape groups as the loss does."""
    found = []
    for name, devices in (("bucketed", 1), (layout, 2 if layout == "independent" else 1)):
        # All samples in one step, whatever the layout.
        folder = train(
            folder=name,
            devices=devices,
            run={"steps": 1},
            planning=LAYOUTS[name],
            objective={"condition_dropout": 0.0},
        )
        (row,) = metrics(folder)
        assert row["samples"] == 24
        variables = restored(folder)["variables"]["blocks/mean_square"]
        found.append([row["loss"], row["predictor_loss"], row["mean_square"], *variables])
    np.testing.assert_allclose(*found, rtol=1e-4)


@pytest.mark.slow
def test_a_family_from_outside_is_exported_and_drawn_from_its_folder(train, tmp_path, monkeypatch):
    folder = train()
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
    from pooling import PoolingConfig

    model = PoolingConfig(num_classes=4)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(InputError, match="does not fit the model"):
        load_weights(tmp_path / "out", PoolingConfig(num_classes=5), mesh)
    loaded = load_weights(tmp_path / "out", model, mesh)
    assert jax.tree.structure(loaded) == jax.tree.structure(abstract_model(model).params)


def test_a_family_from_outside_is_planned_for_without_its_code(capsys):
    command = ["plan", "--workload", "wan-480p", "--size", "200", "--model", "pooling-small"]
    assert cli.main([*command, "--device", "h200", "--m-mem", "66816", "--ranks", "2"]) == 0
    assert "balanced" in capsys.readouterr().out


@pytest.mark.slow
def test_an_objective_with_a_loss_from_inside_layers_and_a_second_optimizer(train):
    groups = [{"parameters": ["predictor"], "learning_rate": 1e-6, "weight_decay": 0.0}]
    still = train(
        folder="still",
        objective={"name": "half_velocity"},
        optimizer={"groups": groups, "clip_norm": 1e9},
    )
    moved = train(folder="moved", objective={"name": "half_velocity"}, optimizer={"clip_norm": 1e9})
    still, moved = (restored(each)["params"] for each in (still, moved))
    for name in still:
        # Two programs, which may round differently; at the other learning rate nothing is close.
        same = np.allclose(still[name], moved[name], rtol=1e-5, atol=1e-7)
        # Only the predictors followed the second optimizer; the model does not see them.
        assert same == ("predictor" not in name), name


@pytest.mark.slow
def test_the_predictors_loss_reaches_nothing_but_the_predictors(train):
    light, heavy = (
        restored(
            train(
                folder=f"weight{weight}",
                objective={"name": "half_velocity", "predictor_weight": weight},
                optimizer={"clip_norm": 1e9},
            )
        )["params"]
        for weight in (0.5, 50.0)
    )
    for name in light:
        if "predictor" not in name:
            np.testing.assert_array_equal(light[name], heavy[name])


@pytest.mark.slow
def test_only_parameters_that_match_a_pattern_are_trained(train):
    parameters = {"trained": ["blocks/"], "frozen": ["predictor"], "frozen_dtype": "bfloat16"}
    begin = train(folder="begin", run={"steps": 1}, optimizer={"learning_rate": 1e-12})
    folder = train(folder="frozen", parameters=parameters)
    start, end = restored(begin)["params"], restored(folder)
    assert all("blocks/" in name and "predictor" not in name for name in end["params"])
    assert set(end["params"]) | set(end["frozen"]) == set(start)
    for name, value in end["frozen"].items():
        assert value.dtype == jax.numpy.bfloat16
        np.testing.assert_allclose(value.astype(np.float32), start[name], rtol=1e-2, atol=1e-9)
    assert not any(np.array_equal(value, start[name]) for name, value in end["params"].items())
    # No gradient, moment or average of what is frozen.
    stored = (folder / "checkpoints" / "6" / "state" / "_METADATA").read_text()
    keys = [key for key in stored.split("(") if "predictor" in key or "classes" in key]
    assert keys
    assert all(key.startswith("'frozen'") for key in keys)


@pytest.mark.slow
def test_a_frozen_run_resumes_and_another_pattern_is_refused(train):
    frozen = {"trained": ["blocks/"], "frozen_dtype": "bfloat16"}
    folder = train(run={"steps": 4}, parameters=frozen)
    train("--run.steps", "6", parameters=frozen)
    assert len(metrics(folder)) == 6
    with pytest.raises(InputError, match="checkpoint of another parameters"):
        train("--run.steps", "8")


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"trained": ["lora"]}, r"parameters.trained: 'lora' matches no parameter"),
        ({"frozen": ["."]}, "leaves nothing of parameters.trained"),
        ({"trained": ["("]}, "is not a regular expression"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns, words, train):
    with pytest.raises(InputError, match=words):
        train(parameters=patterns)


def test_patterns_of_an_optimizer_group_must_match(train):
    with pytest.raises(InputError, match=r"optimizer.groups: parameters: 'lora' matches no"):
        train(optimizer={"groups": [{"parameters": ["lora"]}]})


def test_a_group_that_matches_only_frozen_parameters_is_refused(train):
    with pytest.raises(InputError, match="'predictor' matches no trained parameter"):
        train(
            parameters={"frozen": ["predictor"]},
            optimizer={"groups": [{"parameters": ["predictor"]}]},
        )


def test_a_run_with_other_optimizer_groups_is_refused(train):
    train(run={"steps": 1}, optimizer={"groups": [{"parameters": ["predictor"]}]})
    for groups in ([], [{"parameters": ["hidden"]}]):
        with pytest.raises(InputError, match="checkpoint of another optimizer: groups was"):
            train(run={"steps": 2}, optimizer={"groups": groups})


def test_the_identity_of_all_parameters_is_empty():
    assert ParametersConfig().identity() == {}


def test_a_callback_from_outside_is_called_at_its_hooks(train):
    folder = train(callbacks=[{"name": "count", "every": 4}])
    steps = [["step", number] for number in range(6)]
    assert json.loads((folder / "count.json").read_text()) == [
        ["start", 0],
        *steps[:4],
        ["act", 4, 4],
        *steps[4:],
        ["stop", 6],
        ["finish", 6],
    ]


def test_a_data_set_from_outside_is_made_by_name(train, tmp_path, capsys):
    made = {"folder": str(tmp_path / "made"), "dataset": {"name": "ramps", "count": 12}}
    train(data=made, run={"steps": 1})
    assert "writing ramps to" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"holds data of another data\.dataset"):
        train(data=made | {"dataset": {"name": "ramps", "count": 9}})
