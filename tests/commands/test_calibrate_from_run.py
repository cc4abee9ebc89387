"""`alload calibrate --from-run`, on a folder as a run leaves it."""

import json

import pytest

from alload_jax.planning.cost import (
    CostFile,
    QuadraticCost,
    SparseTerms,
    read_cost_file,
    write_cost_file,
)

CONFIG = """
run: {folder: run}
data: {folder: data}
planning: {policy: balanced, m_mem: 64}
model: {dim: 64, num_heads: 2, num_layers: 1}
"""


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "environment.json").write_text(json.dumps([{"devices": ["cpu"], "versions": {}}]))
    rows = []
    for number in range(40):
        rows_of_step, tokens, squares = 1 + number % 5, 100.0 * (1 + number % 7), 1e4 * number
        seconds = 0.01 + 1e-3 * rows_of_step + 1e-4 * tokens + 1e-7 * squares
        rows.append(
            {
                "step": number + 1,
                "cost_terms": [1.0, float(rows_of_step), tokens, squares],
                "step_seconds": seconds,
                "input_wait_seconds": 0.0,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def calibrated(alload, run):
    """The cost model of the run, and what the command prints."""

    def calibrate():
        status, out, _ = alload("calibrate", "--from-run", "run", "--out", "cost.json")
        assert status == 0
        return read_cost_file("cost.json"), out

    return calibrate


def test_a_runs_step_times_become_a_cost_model(run, calibrated):
    with (run / "metrics.jsonl").open("a") as file:  # validations have lines of their own
        file.write('{"step": 40, "validation/set": "a", "validation/loss": 1.0}\n')
    costs, said = calibrated()
    assert "40 steps, mean error 0.0%" in said
    assert costs.quadratic.c1 == pytest.approx(1e-4, rel=1e-3)
    assert costs.quadratic.c2 == pytest.approx(1e-7, rel=1e-3)
    assert (costs.device, costs.origin) == ("cpu", "measured")
    # Its start tells what a program costs.
    summary = {"programs": 4, "compile_seconds": 20.0, "first_step_seconds": 32.0}
    (run / "summary.json").write_text(json.dumps(summary))
    costs, _ = calibrated()
    assert (costs.program_seconds, costs.start_seconds) == (5.0, 12.0)
    assert costs.first_step_seconds(10) == pytest.approx(62.0)


@pytest.mark.parametrize("planned", [True, False])
def test_a_run_with_sparse_attention_gives_its_terms_too(run, tmp_path, calibrated, planned):
    config = CONFIG.replace("num_layers: 1", "num_layers: 1, sparse_attention: {min_tokens: 0}")
    if planned:
        costs = tmp_path / "planned.json"
        quadratic, terms = QuadraticCost(0.01, 1e-4, 1e-7, 1e-3), SparseTerms(2e-7, 1e-5, 1e-9)
        write_cost_file(costs, CostFile(quadratic=quadratic, sparse=terms))
        config = config.replace("m_mem: 64", f"m_mem: 64, cost_model: {costs}")
    (run / "config.yaml").write_text(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(lines):
        pairs, tokens, squares = 3e3 * (number * 7 % 11), 20.0 * (number % 9), 1e5 * (number % 4)
        row["cost_terms"] += [pairs, tokens, squares]
        row["step_seconds"] += 2e-7 * pairs + 1e-5 * tokens + 1e-9 * squares
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    found, _ = calibrated()
    assert found.quadratic.c2 == pytest.approx(1e-7, rel=1e-2)
    assert found.sparse.c3 == pytest.approx(2e-7, rel=1e-2)
    assert found.model["sparse_attention"]["selector"] == "pooled"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (None, None, "holds no run"),
        ("metrics.jsonl", "", "steps can be fitted"),
        ("metrics.jsonl", "not JSON\n", "line 1: is not valid JSON"),
        ("config.yaml", "run: [\n", "is not valid YAML"),
    ],
)
def test_what_is_no_run_or_a_damaged_one_is_one_line(name, content, words, run, refused):
    if name:
        (run / name).write_text(content)
    place = "run" if name else "none"
    refused(words, "calibrate", "--from-run", place, "--out", "cost.json")
