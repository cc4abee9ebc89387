"""What runs in pairs of seeds have shown: ratios of their losses and seconds."""

import json

import numpy as np
import pytest

from alload_jax.training.run_files import read_metrics
from benchmarks.paired_runs import VALIDATIONS, ratios_of, result_of

STEPS, LEVELS = 40, (0.1, 0.9)


def written(folder, rng, losses=1.0, seconds=1.0):
    """Metrics of a run, whose losses and seconds are those of `rng` times a factor."""
    folder.mkdir()
    rows = []
    for step in range(1, STEPS + 1):
        rows.append({"step": step, "step_seconds": seconds * rng.uniform(1, 2)})
        if step % (STEPS // VALIDATIONS) == 0:
            found = {f"validation/loss/sigma_{level}": rng.uniform(0.1, 9) for level in LEVELS}
            row = {name: value * losses for name, value in found.items()}
            rows.append({"step": step, "validation/loss": sum(row.values())} | row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return result_of(folder, list(read_metrics(folder / "metrics.jsonl")))


@pytest.mark.parametrize(("losses", "seconds"), [(1.0, 1.0), (1.02, 0.6)])
def test_ratios_are_the_factors_between_runs_of_a_seed(losses, seconds, tmp_path):
    cases = []
    for seed in range(3):
        for arm, factors in {"dense": (1, 1), "sparse": (losses, seconds)}.items():
            found = written(tmp_path / f"{arm}_{seed}", np.random.default_rng(seed), *factors)
            cases.append({"arm": arm, "seed": seed} | found)
    (found,) = ratios_of(cases, "dense").values()
    for name in ("loss", *map(str, LEVELS)):
        np.testing.assert_allclose(found[name], losses)
    np.testing.assert_allclose(found["seconds"], seconds)
    np.testing.assert_allclose(found["last_quarter_step_seconds"], seconds)


def test_a_loss_of_one_level_does_not_outweigh_those_of_the_others(tmp_path):
    cases = []
    for arm, factor in {"dense": 1.0, "sparse": 2.0}.items():
        found = written(tmp_path / arm, np.random.default_rng(0))
        found["held_out"][-1]["losses"]["0.9"] *= factor
        cases.append({"arm": arm, "seed": 0} | found)
    np.testing.assert_allclose(ratios_of(cases, "dense")["sparse"]["loss"], 2**0.5)
