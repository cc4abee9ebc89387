"""The command line recorded with results."""

import sys

import pytest

from alload_jax.commands.bench_output import typed


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
