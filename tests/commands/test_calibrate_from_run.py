"""`alload calibrate --from-run`, on a folder as a run leaves it."""

import json

import pytest

from alload_jax import cli
from alload_jax.errors import run_command
from alload_jax.planning.cost import read_cost_file

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


def test_a_runs_step_times_become_a_cost_model(run, tmp_path, capsys):
    out = tmp_path / "cost.json"
    flags = ["calibrate", "--from-run", str(run), "--out", str(out)]
    assert run_command(cli.main, flags) == 0
    assert "40 steps, mean error 0.0%" in capsys.readouterr().out
    costs = read_cost_file(out)
    assert costs.quadratic.c1 == pytest.approx(1e-4, rel=1e-3)
    assert costs.quadratic.c2 == pytest.approx(1e-7, rel=1e-3)
    assert (costs.device, costs.origin) == ("cpu", "measured")


def test_what_is_no_run_is_one_line(run, tmp_path, capsys):
    for folder, words in ((tmp_path / "none", "holds no run"), (run, "steps can be fitted")):
        (run / "metrics.jsonl").write_text("")
        flags = ["calibrate", "--from-run", str(folder), "--out", str(tmp_path / "cost.json")]
        assert run_command(cli.main, flags) != 0
        error = capsys.readouterr().err.strip()
        assert words in error
        assert "\n" not in error
    assert not (tmp_path / "cost.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", "not JSON\n", "line 1 is not a JSON object; remove the line"),
        ("config.yaml", "run: [\n", "config.yaml: not YAML"),
    ],
)
def test_a_damaged_run_is_one_line(name, content, words, run, tmp_path, capsys):
    (run / name).write_text(content + (run / name).read_text())
    flags = ["calibrate", "--from-run", str(run), "--out", str(tmp_path / "cost.json")]
    assert run_command(cli.main, flags) != 0
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error
