"""What a run says before its first step, and `alload report` of what it has recorded."""

import json

import numpy as np
import pytest
from PIL import Image

from alload_jax.cli import main
from alload_jax.errors import InputError
from alload_jax.planning.cost import PowerCost, QuadraticCost
from alload_jax.planning.factory import make_plan
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.report.summary import Opening, changed_settings, opening_lines, unused_settings

# ---------------------------------------------------------------- before the first step


def opening_of(lengths, m_mem, ranks=2, cost=None):
    config, lengths = PlanningConfig(policy="equal_tokens", m_mem=m_mem), np.asarray(lengths)
    shape = np.stack([np.ones_like(lengths), np.full_like(lengths, 16), 16 * lengths], axis=1)
    plan = make_plan(config, Samples(shape, lengths), ranks, seed=0)
    cost = cost or PowerCost(2.0)
    return Opening(plan, "equal_tokens", m_mem, cost, True, 100, 20, "new, drawn with run.seed 0")


def test_a_run_says_what_it_will_do_and_what_the_model_does_not_read():
    opening = opening_of([10] * 40, 100, cost=QuadraticCost(1.0, 0.01, 0.0))
    lines, warnings = opening_lines(opening)
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
    opening = opening_of([10] * 40, 100)._replace(doubts=["each sample has embeddings"])
    lines, warnings = opening_lines(opening)
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
    _, warnings = opening_lines(opening_of(lengths, m_mem, ranks=1))
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


# ---------------------------------------------------------------- pictures

RED = np.array((0xF8, 0x51, 0x49))


def draw(folder, name, file, rows):
    """The picture of a report on these lines."""
    (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", name, str(folder)]) == 0
    return np.asarray(Image.open(folder / f"{name}.png").convert("RGB")).astype(int)


def sparsity_rows(sparsity, sparse):
    """Steps of two layers with two heads."""
    return [
        {"step": 10 * number, "sparse": on, "sparsity": [[share] * 2] * 2}
        | {"recall": [[0.9] * 2] * 2, "density": [[0.5] * 2] * 2}
        for number, (share, on) in enumerate(zip(sparsity, sparse, strict=True), 1)
    ]


def test_switches_to_sparse_layers_are_marked_and_shares_coloured(tmp_path, capsys):
    rows = sparsity_rows([0.1] * 3, [[False, False]] * 3)
    never = draw(tmp_path, "sparsity", "layers.jsonl", rows).reshape(-1, 3)
    rows = sparsity_rows([0.1, 0.5, 0.9], [[False, False]] * 2 + [[True, False]])
    switched = draw(tmp_path, "sparsity", "layers.jsonl", rows).reshape(-1, 3)
    assert not (never == RED).all(axis=1).any()
    assert (switched == RED).all(axis=1).any()
    assert "step 30: 1 of 2 layers are sparse" in capsys.readouterr().out
    assert len(np.unique(switched, axis=0)) > len(np.unique(never, axis=0))


def validation_rows(losses, first=10, measured="a"):
    """Lines of steps, and of validations on a set."""
    return [{"step": number, "loss": 1.0} for number in range(1, 50)] + [
        {"step": first + 10 * number, "validation/set": measured, "validation/samples": 3}
        | {"validation/loss": loss, "validation/loss/1x8x8": loss + 0.1}
        | {"validation/loss/sigma_0.5": loss - 0.1}
        for number, loss in enumerate(losses)
    ]


def test_the_lowest_validation_loss_has_a_ring(tmp_path, capsys):
    def ring(losses):
        """Its mean place, (row, column)."""
        page = draw(tmp_path, "validation", "metrics.jsonl", validation_rows(losses))
        return np.argwhere(np.abs(page - RED).sum(axis=-1) < 12).mean(axis=0)

    early = ring([0.5, 0.9, 0.8])
    assert "lowest loss at step 10 of 30" in capsys.readouterr().out
    late = ring([0.9, 0.8, 0.5])
    assert late[1] > early[1] + 200
    assert abs(late[0] - early[0]) < 20
    # Losses of another set are not drawn.
    rows = validation_rows([0.1, 0.2], measured="old") + validation_rows([0.9, 0.8], first=30)
    draw(tmp_path, "validation", "metrics.jsonl", rows)
    assert "lowest loss at step 40 of 40" in capsys.readouterr().out


def test_what_is_missing_for_a_picture_is_named(tmp_path):
    nothing = [{"step": 10, "validation/set": "a", "validation/samples": 0}]
    layers = sparsity_rows([0.1], [[False] * 2])
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
