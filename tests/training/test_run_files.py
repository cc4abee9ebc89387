"""Files of a run's folder: its lock, and the damaged records that it counts; and its progress."""

import io
import os
import re
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from alload_jax.data.loader import PlacedStep
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.training import progress
from alload_jax.training.callbacks.telemetry import Telemetry
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import LOCK_NAME, BadRecords, MetricsLog, locked
from alload_jax.training.trackers import TensorBoard

HOLD = """
import signal, sys
from pathlib import Path
from alload_jax.distributed.cluster import Cluster
from alload_jax.training.run_files import locked
with locked(Path(sys.argv[1]), Cluster()):
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_until_the_first_one_ends(tmp_path, holder):
    def refused():
        with pytest.raises(InputError) as error, locked(tmp_path, Cluster()):
            pass
        return str(error.value)

    message = refused()
    assert message.startswith(f"{tmp_path}: another run trains here (process {holder.pid} on ")
    assert re.search(r"since \d{4}-\d\d-\d\d .*UTC\); stop it, wait for its end, or", message)
    (tmp_path / LOCK_NAME).write_text("{")  # which says nothing, and is still held
    assert "another run trains here; stop" in refused()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    for _ in range(2):
        with locked(tmp_path, Cluster()):
            assert str(os.getpid()) in (tmp_path / LOCK_NAME).read_text()


def test_file_systems_without_locks_are_noted(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("alload_jax.training.run_files.fcntl.flock", refuse)
    with locked(tmp_path, Cluster()):
        pass
    assert "cannot be locked (Operation not supported); start no other" in capsys.readouterr().out


# ---------------------------------------------------------------- damaged records


def refusal(folder, max_bad_records, *problems):
    """What telemetry says of a step with damaged records."""
    records, run = BadRecords(folder / "bad_records.txt", Cluster()), SimpleNamespace(refusal="")
    run.refuse = partial(setattr, run, "refusal")
    log, tracker = MetricsLog(folder, resumed_at=0), TensorBoard(folder / "events", resumed_at=0)
    bar = ProgressBar("training", 4)
    told = Telemetry(None, lambda step: 1.0, log, tracker, records, max_bad_records, bar)
    told.on_start(run)
    told.on_step_start(run, PlacedStep(3, 0, (), problems, 0, 0.0))
    told.close()
    return run.refusal


def test_a_refusal_counts_the_records_of_earlier_starts_and_says_where_they_are(tmp_path):
    listed = tmp_path / "bad_records.txt"
    listed.write_bytes(b"shard: record 1 is damaged\n\xff\xfe\n")
    assert refusal(tmp_path, 0) == ""  # those that were damaged once stop no later start
    assert refusal(tmp_path, 3, "shard: record 3") == ""
    found = refusal(tmp_path, 3, "shard: record 4")
    assert found.startswith("shard: record 4; restore the record, or allow more than")
    assert found.endswith(f"(3 others are in {listed}; delete it where they are restored)")
    (tmp_path / "new").mkdir()
    assert " in " not in refusal(tmp_path / "new", 0, "shard: record 1")


# ---------------------------------------------------------------- progress


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_done_before_count_for_no_speed(monkeypatch, terminal):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=200)
    with ProgressBar("work", total=110, console=console) as bar:
        bar.skip(90)
        for _ in range(10):
            now[0] += 1.5
            bar.advance("note")
    lines = written.getvalue()
    if terminal:
        assert "100/110" in lines
    else:  # the 10 left take as long as the 10 done
        assert re.findall(r"\d+/110 · note · \d+ s left", lines) == ["97/110 · note · 20 s left"]
