import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    """A program of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def in_process(monkeypatch):
    """`alload bench step` and `balance` measure in this process, which takes less time."""

    def measured(program, settings, variables=None):
        found = importlib.import_module(program).measure(**settings)
        return json.loads(json.dumps(found))

    monkeypatch.setattr("alload_jax.bench.harness.measured", measured)
