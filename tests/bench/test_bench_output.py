"""What results are written as: the command line, the JSON, tables."""

import json
import sys

import pytest

from alload_jax.bench.harness import Record, markdown, measured, typed


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["benchmarks/table.py", "--out", "a b"], "python benchmarks/table.py --out 'a b'"),
        (["/home/someone/.venv/bin/alload", "bench", "step"], "alload bench step"),
        (["/home/someone/alload_jax/cli.py"], "cli.py"),
    ],
)
def test_the_command_is_recorded_without_absolute_folders(argv, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert typed() == command


def test_a_file_holds_every_result_as_soon_as_it_is_known(tmp_path):
    out = tmp_path / "found.json"
    record = Record(out, ["numpy", "no-such-package"], cases=[])
    for number in range(3):
        record.add({"number": number})
        content = json.loads(out.read_text())
        assert [case["number"] for case in content["cases"]] == list(range(number + 1))
    assert content["versions"]["numpy"]
    assert content["versions"]["no-such-package"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_table_begins_with_words():
    lines = markdown(("data", "case", "s"), [("a", "b", 1), ("", "c", 2.5)], left=2).splitlines()
    assert lines == ["| data | case | s |", "|---|---|---:|", "| a | b | 1 |", "|  | c | 2.5 |"]


def test_what_fails_in_a_process_is_told_in_a_line(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('too small')\n")
    found = measured(script, {"size": 1})
    assert found["error"] == "ended with status 1: ValueError: too small"
    assert found["settings"] == {"size": 1}
