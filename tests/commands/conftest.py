"""Runs the command in this process, in an empty folder."""

import json

import pytest

from alload_jax import cli
from alload_jax.errors import run_command


@pytest.fixture
def alload(tmp_path, monkeypatch, capsys):
    """Runs a command; returns its status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        capsys.readouterr()
        status = run_command(cli.main, [str(part) for part in argv])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def refused(alload, tmp_path):
    """Runs a command that must be refused in one line, which says all parts, and write nothing."""

    def files():
        return {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}

    def run(parts, *argv):
        before = files()
        status, out, err = alload(*argv)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        for part in [parts] if isinstance(parts, str) else parts:
            assert part in err
        assert files() == before

    return run


@pytest.fixture
def figures(alload):
    """Runs `alload plan --json` and returns its JSON."""

    def run(*argv):
        status, out, err = alload("plan", *argv, "--json")
        assert (status, err) == (0, "")
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return run
