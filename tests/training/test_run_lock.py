"""The lock of a run folder."""

import os
import re
import signal
import subprocess
import sys

import pytest

from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.training.run_files import LOCK_NAME, locked

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


def test_a_second_run_is_refused_by_name(tmp_path, holder):
    with pytest.raises(InputError) as refused, locked(tmp_path, Cluster()):
        pass
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}: another run trains here (process {holder.pid} on ")
    assert re.search(r"since \d{4}-\d\d-\d\d .*UTC\); stop it, wait for its end, or", message)


def test_the_lock_of_a_killed_run_is_free(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with locked(tmp_path, Cluster()):
        assert str(os.getpid()) in (tmp_path / LOCK_NAME).read_text()
    with locked(tmp_path, Cluster()):
        pass


def test_a_lock_that_says_nothing_is_still_held(tmp_path, holder):
    (tmp_path / LOCK_NAME).write_text("{")
    with (
        pytest.raises(InputError, match="another run trains here; stop it"),
        locked(tmp_path, Cluster()),
    ):
        pass


def test_file_systems_without_locks_are_noted(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("alload_jax.training.run_files.fcntl.flock", refuse)
    with locked(tmp_path, Cluster()):
        pass
    assert "cannot be locked (Operation not supported); start no other" in capsys.readouterr().out
