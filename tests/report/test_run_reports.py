"""What a run says before its first step, and `alload report` of what it has recorded."""

import json

import numpy as np
import pytest
from looks import assert_looks
from PIL import Image

from alload_jax.cli import main
from alload_jax.commands import report
from alload_jax.errors import InputError
from alload_jax.planning.cost import PowerCost, QuadraticCost
from alload_jax.planning.factory import make_plan
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.report import pictures
from alload_jax.report.summary import (
    changed_settings,
    opening_lines,
    print_summary,
    summarise,
    unused_settings,
)

# ---------------------------------------------------------------- before the first step


def opening_of(lengths, m_mem, ranks=2, cost=None):
    config, lengths = PlanningConfig(policy="equal_tokens", m_mem=m_mem), np.asarray(lengths)
    shape = np.stack([np.ones_like(lengths), np.full_like(lengths, 16), 16 * lengths], axis=1)
    plan = make_plan(config, Samples(shape, lengths), ranks, seed=0)
    cost = cost or PowerCost(2.0)
    fields = (plan, "equal_tokens", m_mem, cost, True, 100, 20, "new, drawn with run.seed 0")
    names = ("plan", "policy", "m_mem", "cost_model", "timed", "steps", "start", "weights")
    return dict(zip(names, fields, strict=True))


def test_a_run_says_what_it_will_do_and_what_the_model_does_not_read():
    opening = opening_of([10] * 40, 100, cost=QuadraticCost(1.0, 0.01, 0.0))
    lines, warnings = opening_lines(**opening)
    assert lines == [
        "data: 40 samples of 10 to 10 tokens; an epoch has 2 steps, the run 100 (50.0 epochs)",
        "steps: 20.0 samples on 2 ranks by equal_tokens, 100% of m_mem (100 tokens) filled, "
        "0.0% padding; programs to compile: 1",
        "predicted: 2.00 s a step, 0.0 h for what is left, without compilation; ranks wait 0.0% "
        "of the time",
        "weights: new, drawn with run.seed 0",
    ]
    assert warnings == []
    # Costs without a unit predict no time.
    opening = opening_of([10] * 40, 100) | {"doubts": ["each sample has embeddings"]}
    lines, warnings = opening_lines(**opening)
    assert not any(line.startswith("predicted") for line in lines)
    assert warnings == ["each sample has embeddings"]


@pytest.mark.parametrize(
    ("lengths", "m_mem", "words"),
    [
        ([60] * 40, 110, "micro-batches fill 55% of planning.m_mem on average; lower"),
        (range(50, 90), 90, "10 programs are compiled for 40 samples; prepare fewer sizes"),
    ],
)
def test_poor_plans_are_named(lengths, m_mem, words):
    _, warnings = opening_lines(**opening_of(lengths, m_mem, ranks=1))
    assert any(words in warning for warning in warnings)


def test_changed_settings_and_weights_that_are_not_read_are_named():
    keys = ["run.initial_weights", "run.initial_lora"]
    for key, earlier in ((keys[0], None), (keys[1], "a")):
        before = {"run.steps": 5, key: earlier}
        now = {"run.steps": 6} | dict.fromkeys(keys) | {key: "garbage"}
        line = unused_settings(before, now)
        assert line.startswith(f"{key} garbage: not used")
        assert "run.folder" in line
        assert unused_settings(now, now) == unused_settings({}, now) == ""
    before = {"run.steps": 10, "optimizer.learning_rate": 1e-3, "old": 1}
    now = {"run.steps": 20, "optimizer.learning_rate": 1e-3, "new": 2}
    assert changed_settings(before, now) == "changed since the last start: run.steps 10 → 20"
    assert changed_settings(now, now) == ""
    many = {str(n): n for n in range(9)}
    line = changed_settings(many, {key: value + 1 for key, value in many.items()})
    assert line.endswith(" and 3 more")


# ---------------------------------------------------------------- after the last step


def test_a_summary_adds_up_what_the_steps_recorded(tmp_path, capsys):
    counts, seconds = ("samples", "tokens", "skipped"), ("step_seconds", "input_wait_seconds")
    rng, shares = np.random.default_rng(0), ("imbalance", "padding")
    of = {name: rng.integers(1, 900, 120) for name in counts}
    of |= {name: rng.random(120) for name in (*seconds, *shares, "loss")}
    rows = [{name: values[n] for name, values in of.items()} for n in range(120)]

    def loss(part):
        return np.average(of["loss"][part], weights=of["samples"][part])

    time, waited = (of[name].sum() for name in seconds)
    expected = {"accuracy": 0.5, "peak_memory_bytes": 7_000, "steps": 130, "seconds": 1234.56}
    expected |= {"loss_first": loss(slice(50)), "loss_last": loss(slice(-50, None))}
    expected |= {f"{name}_seen": of[name].sum() for name in ("samples", "tokens")}
    expected |= {"records_skipped": of["skipped"].sum(), "train_seconds": time}
    expected |= {"tokens_per_second": of["tokens"].sum() / time, "steps_per_second": 120 / time}
    expected |= {"imbalance": of["imbalance"].mean(), "input_wait_share": waited / time}
    computed = sum(of["tokens"] / (1 - of["padding"]))
    expected |= {"padding": 1 - of["tokens"].sum() / computed}  # as a plan counts it
    found = summarise(rows, 130, {"accuracy": 0.5}, 7_000, 1234.56)
    assert found == pytest.approx(expected)
    for count, half in ((5, 2), (1, 1)):
        short = summarise([row | {"update_skipped": 1} for row in rows[:count]], 9, {}, None, 1.0)
        assert short["loss_first"] == pytest.approx(loss(slice(half)))
        assert short["loss_last"] == pytest.approx(loss(slice(count - half, count)))
        assert short["updates_skipped"] == count
        assert "peak_memory_bytes" not in short
    others = [row | {"cost_drift": 0.1, "update_skipped": 1} for row in rows[:3]]  # another config
    assert summarise([*others, *rows], 9, {}, None, 1.0)["updates_skipped"] == 3
    print_summary(found | {"imbalance": 0.1234}, folder := tmp_path / ("x" * 99))
    shown = " ".join(capsys.readouterr().out.split())
    for line in ("accuracy │ 0.5000", "imbalance │ 12.34%", "seconds │ 1,234.6"):
        assert line in shown
    assert "peak memory bytes │ 7,000" in shown
    assert f"{folder}: finished at step 130" in shown
    assert "pictures:" not in shown
    with pytest.raises(InputError, match="nothing to summarise"):
        summarise([], 1, {}, None, 0.0)


# ---------------------------------------------------------------- pictures


def draw(folder, name, file, rows):
    """The picture of a report on these lines."""
    folder = folder / "run"  # its name is in the title
    folder.mkdir()
    (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", name, str(folder)]) == 0
    return Image.open(folder / f"{name}.png")


def test_shares_and_switches_to_sparse_layers_are_drawn(tmp_path, capsys):
    sparse = [[False, False], [True, False], [True, True], [False, True]]
    rows = [
        {"step": 10 * number, "sparse": on, "sparsity": [[share, 0.5], [0.2, share**2]]}
        | {"recall": [[0.9] * 2] * 2, "density": [[0.3, 0.6]] * 2}
        for number, (share, on) in enumerate(zip((0.1, 0.5, 0.9, 0.7), sparse, strict=True), 1)
    ]
    assert_looks(draw(tmp_path, "sparsity", "layers.jsonl", rows), (1176, 498, 2.62))
    assert "step 40: 1 of 2 layers are sparse" in capsys.readouterr().out


def validation_rows(losses, first=10, measured="a"):
    """Lines of steps, and of validations on a set."""
    return [{"step": number, "loss": 1.0} for number in range(1, 50)] + [
        {"step": first + 10 * number, "validation/set": measured, "validation/samples": 3}
        | {"validation/loss": loss, "validation/loss/1x8x8": loss + 0.1}
        | {"validation/loss/5x8x8": loss + 0.2, "validation/loss/sigma_0.5": loss - 0.1}
        for number, loss in enumerate(losses)
    ]


def test_losses_of_the_last_set_are_drawn_and_the_lowest_has_a_ring(tmp_path, capsys):
    rows = validation_rows([0.1, 0.2], measured="old") + validation_rows([0.9, 0.8, 0.85], first=30)
    assert_looks(draw(tmp_path, "validation", "metrics.jsonl", rows), (1400, 588, -0.97))
    assert "lowest loss at step 40 of 50" in capsys.readouterr().out


def test_what_is_missing_for_a_picture_is_named(tmp_path):
    nothing = [{"step": 10, "validation/set": "a", "validation/samples": 0}]
    layers = [
        {"step": 1, "sparse": [True], "sparsity": [[1.0]], "recall": [[1.0]], "density": [[1.0]]}
    ]
    for name, file, rows, flags, words in (
        ("sparsity", "none", [], [], r"layers.jsonl holds no sparsity; train with"),
        ("sparsity", "layers.jsonl", layers, ["--out", "/nowhere/x.png"], "--out"),
        ("validation", "metrics.jsonl", [], [], "holds no validation loss; train with validation"),
        ("validation", "metrics.jsonl", nothing, [], "holds no validation loss; train with"),
        ("speed", "none", [], [], "invalid choice"),
    ):
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(InputError, match=words):
            main(["report", name, str(tmp_path), *flags])
    for name in ("sparsity", "validation"):
        with pytest.raises(InputError, match=rf"report {name}: .*nowhere: no such folder; name a"):
            main(["report", name, str(tmp_path / "nowhere")])


@pytest.mark.parametrize("count", [1, 4, 5, 41, 1000])
def test_the_picture_of_a_long_run_shows_few_of_its_lines(count, tmp_path, monkeypatch):
    lines = "".join(f'{{"step": {step}, "sparsity": 1, "sparse": []}}\n' for step in range(count))
    (tmp_path / "layers.jsonl").write_text(lines)
    shown = []
    monkeypatch.setattr(report, "_MOST_ROWS", 4)
    monkeypatch.setattr(pictures, "write_sparsity_picture", lambda out, rows, _: shown.extend(rows))
    assert main(["report", "sparsity", str(tmp_path)]) == 0
    steps = [row["step"] for row in shown]
    assert (steps[0], steps[-1]) == (0, count - 1)
    assert len(steps) == count if count < 5 else 3 <= len(steps) <= 5
    assert len(np.unique(np.diff(steps[:-1]))) <= 1
