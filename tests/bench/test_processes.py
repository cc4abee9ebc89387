"""What `benchmarks/processes.py` takes for a measurement."""

import os

import pytest

from alload_jax.errors import InputError
from benchmarks import processes

TRAIN = """
import json, os, pathlib, sys, time
assert os.environ["XLA_FLAGS"].split()[0] == "--mine"
folder = pathlib.Path(sys.argv[sys.argv.index("--run.folder") + 1])
folder.mkdir()
row = dict(step=1, epoch=0, loss=1.5, step_seconds=0.5, tokens=4)
(folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
time.sleep(0.2)
sys.exit({})
"""


@pytest.mark.parametrize("said", ["out of memory", 0])
def test_a_run_that_fails_after_its_first_step_has_no_rate(tmp_path, said):
    (tmp_path / "train.py").write_text(TRAIN.format(repr(said)))
    environ = os.environ | {"XLA_FLAGS": "--mine"}
    run = processes.Run(tmp_path / "run", [str(tmp_path / "train.py")], 1, 1)
    if said:
        with pytest.raises(InputError, match="the run ended: out of memory"):
            processes.steady(run, environ)
    else:
        assert processes.steady(run, environ)["rate"] == 8


def test_a_run_beside_a_program_that_failed_was_not_slowed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "__file__", str(tmp_path / "none.py"))
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    (tmp_path / "train.py").write_text(TRAIN.format(0))
    run = processes.Run(tmp_path / "run", [str(tmp_path / "train.py")], 1, 1)
    with pytest.raises(InputError, match="the program beside the run ended"):
        processes.slowed(run, 0, 0.2)
