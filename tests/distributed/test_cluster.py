import socket
import subprocess
import sys
import time

import pytest

from alload_jax.distributed.cluster import Cluster, _appears
from alload_jax.distributed.coordination import member_by_launcher
from alload_jax.distributed.coordinator_proxy import CoordinatorProxy
from alload_jax.distributed.initialize import ClusterConfig, initialize
from alload_jax.errors import InputError

ALL = {"coordinator": "host:9", "processes": 2, "process": 0}

BAD = [
    ({"process": 1}, "cluster.coordinator and cluster.processes must be given too"),
    ({"coordinator": "host:9", "processes": 2}, "cluster.process must be given too"),
    (ALL | {"process": 2}, "cluster.process is 2; it must be 0 to 1"),
    (ALL | {"process": -1}, "cluster.process is -1"),
    (ALL | {"processes": 0}, "cluster.processes is 0"),
    (ALL | {"coordinator": "host"}, "give it as host:port"),
    (ALL | {"coordinator": "host:99999"}, "cluster.coordinator is host:99999; ports are 1 to"),
    ({"lost_after": 0.0}, "cluster.lost_after is 0.0"),
]

LONE = [
    {},
    # A shell in an allocation, a batch script's first node, `srun -n1 --pty bash`.
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    },
    {"OMPI_COMM_WORLD_SIZE": "1"},
    {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words for _, words in BAD])
def test_flags_that_contradict_are_named(given, words):
    with pytest.raises(InputError, match=words):
        ClusterConfig(**given)


@pytest.mark.parametrize("environment", LONE, ids=range(len(LONE)))
def test_a_lone_process_stays_alone(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert initialize(ClusterConfig()).processes == 1


def test_open_mpi_that_tells_too_little_is_named(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(InputError, match=r"Open MPI: .* give --cluster.coordinator"):
        initialize(ClusterConfig())
    assert initialize(ClusterConfig(detect=False)).processes == 1


def test_what_no_launcher_sets_is_named(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "abc")
    with pytest.raises(InputError, match=r"SLURM_STEP_NUM_TASKS is 'abc'"):
        initialize(ClusterConfig())


def test_slurm_says_who_the_processes_are(monkeypatch):
    step = {"STEP_NODELIST": "n[1-2]", "NTASKS": "4", "PROCID": "2", "LOCALID": "0", "JOB_ID": "7"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    member = member_by_launcher()
    assert member.coordinator.startswith("n1:")
    assert member[1:] == (4, 2, [0])


def test_a_lone_process_broadcasts_and_gathers_its_own():
    with Cluster() as cluster:
        assert cluster.broadcast(lambda: 3) == 3
        assert cluster.all_gather("x") == ["x"]


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        coordinator = f"localhost:{taken.getsockname()[1]}"
        config = ClusterConfig(coordinator=coordinator, processes=2, process=0)
        with pytest.raises(InputError, match=rf"{coordinator}, but process 0 cannot listen there"):
            initialize(config)


GIVES_UP = """
from alload_jax.distributed import initialize
initialize.JOIN_SECONDS, initialize._SILENT_SECONDS = 1.0, 0.2
config = initialize.ClusterConfig(coordinator="nohost.invalid:9", processes=2, process=1)
initialize.initialize(config)
"""


def test_who_meets_nobody_gives_up_in_a_line():
    done = subprocess.run([sys.executable, "-c", GIVES_UP], capture_output=True, text=True)
    assert done.returncode == 2
    waits, gives_up = done.stderr.strip().splitlines()
    assert waits.startswith("waiting for the other processes at nohost.invalid:9: nohost.invalid: ")
    assert gives_up.startswith("error: process 1 of 2 did not meet the others at nohost.invalid:9")


INTERRUPTED = """
import os, signal, threading
from alload_jax.distributed import initialize
config = initialize.ClusterConfig(coordinator="localhost:9", processes=2, process=1)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
initialize.initialize(config)
"""


def test_ctrl_c_ends_the_wait_for_others():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


class Alike(Cluster):
    """Among processes that have what the test says."""

    def __init__(self, *others, told=None):
        super().__init__()
        self.processes, self.others, self.told = 1 + len(others), others, told

    def broadcast(self, find):
        found = find()
        return found if self.told is None else self.told

    def all_gather(self, value):
        return [value, *self.others]


def test_processes_that_differ_are_named():
    mine = {"planning.m_mem": 320, "run.seed": 1}
    Alike(mine, mine).require_same(mine, "same config")
    differing = mine, mine | {"planning.m_mem": 272}
    words = "process 2 of 3: planning.m_mem is 272, but 320 in process 0; same config"
    with pytest.raises(InputError, match=words):
        Alike(*differing).require_same(mine, "same config")
    with pytest.raises(InputError, match=r"process 1 of 2: run.seed is None, but 1"):
        Alike({"planning.m_mem": 320}).require_same(mine, "same config")


def test_a_relay_passes_on_and_stays_open_when_its_target_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as target:
        relay = CoordinatorProxy(f"127.0.0.1:{target.getsockname()[1]}")
        host, port = relay.address.split(":")
        with socket.create_connection((host, int(port))) as near:
            far, _ = target.accept()
            near.sendall(b"there")
            assert far.recv(9) == b"there"
            far.sendall(b"back")
            assert near.recv(9) == b"back"
            far.close()
            time.sleep(0.1)
            near.settimeout(0.3)
            with pytest.raises(TimeoutError):
                near.recv(9)


def test_a_process_that_counts_others_is_named():
    words = "cluster.processes is 3, but 2 in process 0"
    with pytest.raises(InputError, match=words):
        Alike({}, {}, told=2).require_same({}, "same config")


def test_a_folder_that_only_one_host_has_is_named(tmp_path, monkeypatch):
    Alike(True).require_shared("run.folder", tmp_path / "run")
    words = r"run.folder is .*run: what process 0 writes there is not there for process 2 of 3"
    with pytest.raises(InputError, match=words):
        Alike(True, False).require_shared("run.folder", tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    monkeypatch.setattr("alload_jax.distributed.cluster._APPEARS_SECONDS", 0.2)
    assert not _appears(tmp_path / "run" / ".shared-elsewhere")
