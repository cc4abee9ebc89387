import contextlib
import signal
import socket
import subprocess
import sys

import pytest
from patience import PATIENCE

from alload_jax.distributed.cluster import Cluster, _becomes_visible
from alload_jax.distributed.coordination import (
    CoordinatorProxy,
    bind_address,
    is_loopback,
    process_info_from_launcher,
)
from alload_jax.distributed.initialize import ClusterConfig, initialize
from alload_jax.errors import InputError, Terminated

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

SINGLE = [
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


@pytest.mark.parametrize("environment", SINGLE, ids=range(len(SINGLE)))
def test_a_single_process_is_a_cluster_of_one(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert initialize(ClusterConfig(), ".").num_processes == 1
    with pytest.raises(InputError, match=r"cluster\.certificates is keys, and the run has one"):
        initialize(ClusterConfig(certificates="keys"), ".")


def test_an_incomplete_environment_of_open_mpi_is_named(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(InputError, match=r"Open MPI: .* give --cluster.coordinator"):
        initialize(ClusterConfig(), ".")
    assert initialize(ClusterConfig(detect=False), ".").num_processes == 1


def test_a_task_count_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "abc")
    with pytest.raises(InputError, match=r"SLURM_STEP_NUM_TASKS is 'abc'"):
        initialize(ClusterConfig(), ".")


def test_slurm_s_environment_identifies_the_process(monkeypatch):
    step = {"STEP_NODELIST": "n[1-2]", "NTASKS": "4", "PROCID": "2", "LOCALID": "0", "JOB_ID": "7"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    process = process_info_from_launcher()
    assert process.coordinator_address.startswith("n1:")
    assert process[1:] == (4, 2, [0])


def test_a_single_process_broadcasts_and_gathers_its_own_values():
    with Cluster() as cluster:
        assert cluster.broadcast(lambda: 3) == 3
        assert cluster.all_gather("x") == ["x"]


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        coordinator = f"localhost:{taken.getsockname()[1]}"
        config = ClusterConfig(coordinator=coordinator, processes=2, process=0)
        with pytest.raises(InputError, match=rf"{coordinator}, but process 0 cannot listen there"):
            initialize(config, ".")


GIVES_UP = """
from alload_jax.distributed import initialize
initialize.CONNECT_SECONDS, initialize._SILENT_SECONDS = 1.0, 0.2
config = initialize.ClusterConfig(coordinator="nohost.invalid:9", processes=2, process=1)
initialize.initialize(config, ".")
"""


def test_a_process_that_cannot_connect_ends_with_one_line():
    done = subprocess.run([sys.executable, "-c", GIVES_UP], capture_output=True, text=True)
    assert done.returncode == 2
    waits, gives_up = done.stderr.strip().splitlines()
    assert waits.startswith("waiting for the other processes at nohost.invalid:9: nohost.invalid: ")
    words = "error: process 1 of 2 could not connect to the others at nohost.invalid:9"
    assert gives_up.startswith(words)


JOINS = """
import sys
from alload_jax.distributed import coordination, initialize

def forward(self, *sockets):
    print("joined", flush=True)
    real_forward(self, *sockets)

proxy = coordination.CoordinatorProxy
real_forward, proxy._forward_responses = proxy._forward_responses, forward
config = initialize.ClusterConfig(coordinator=sys.argv[1], processes=3, process=int(sys.argv[2]))
initialize.initialize(config, ".")
"""


@pytest.mark.slow
def test_the_end_of_process_0_ends_those_that_wait_for_more(default_signals):
    with socket.create_server(("", 0)) as free:
        coordinator = f"localhost:{free.getsockname()[1]}"
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", JOINS, coordinator, str(n)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in (0, 1)
    )
    assert second.stdout.readline() == "joined\n"  # both wait for the third
    first.kill()
    first.communicate()
    _, said = second.communicate(timeout=PATIENCE)
    assert second.returncode == 2
    (line,) = said.strip().splitlines()
    assert "(because process 0 has ended)" in line


INTERRUPTED = """
import os, signal, socket, sys, threading
from alload_jax.distributed import initialize

def send_signals():
    for number in map(int, sys.argv[2:]):
        attempts.acquire()  # JAX connects, and again a while after the signal before
        os.kill(os.getpid(), number)

def create_connection(*arguments, **options):
    attempts.release()
    return real_create_connection(*arguments, **options)

attempts = threading.Semaphore(0)
real_create_connection, socket.create_connection = socket.create_connection, create_connection
threading.Thread(target=send_signals, daemon=True).start()
signal.signal(signal.SIGINT, getattr(signal, sys.argv[1]))
signal.signal(signal.SIGTERM, signal.SIG_DFL)
config = initialize.ClusterConfig(coordinator="localhost:9", processes=2, process=1)
initialize.initialize(config, ".")
"""


def interrupted(handler, *numbers):
    """A process that receives signals while it waits for others; `handler` is for SIGINT."""
    command = [sys.executable, "-c", INTERRUPTED, handler, *(str(int(n)) for n in numbers)]
    return subprocess.run(command, capture_output=True, text=True)


def test_ctrl_c_ends_the_wait_for_other_processes():
    done = interrupted("default_int_handler", signal.SIGINT)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_a_background_job_ignores_ctrl_c_while_it_waits_and_ends_on_sigterm():
    done = interrupted("SIG_IGN", signal.SIGINT, signal.SIGTERM)
    assert (done.returncode, done.stderr.strip()) == (-signal.SIGTERM, "")


class EndsAtOnce:
    """Stands for the heartbeat of one of several processes, whose end is an exception."""

    def report_failure(self, error):
        self.error = error

    def exit_process(self, status):
        raise SystemExit(status)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (Terminated(75), 75, "SIGTERM: nothing was left to save; the same command goes on\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (InputError("data: no such folder"), 2, "error: data: no such folder\n"),
    ],
)
@pytest.mark.parametrize("reported", [True, False])
def test_one_of_several_processes_ends_like_a_single_one(capsys, error, status, said, reported):
    cluster = Cluster()
    cluster._heartbeat = EndsAtOnce()
    reports = cluster.report_failures() if reported else contextlib.nullcontext()
    with pytest.raises(SystemExit) as end, cluster, reports:
        raise error
    assert end.value.code == status
    assert capsys.readouterr().err == said
    assert cluster._heartbeat.error is error


class FakeCluster(Cluster):
    """A cluster whose other processes have the values that the test gives.

    Attributes:
      others: the values of the other processes.
      from_process_0: what process 0 broadcasts; None if this is process 0.
    """

    def __init__(self, *others, from_process_0=None):
        super().__init__()
        self.num_processes = 1 + len(others)
        self.others, self.from_process_0 = others, from_process_0

    def broadcast(self, compute):
        computed = compute()
        return computed if self.from_process_0 is None else self.from_process_0

    def all_gather(self, value):
        return [value, *self.others]


def test_processes_that_differ_are_named():
    mine = {"planning.m_mem": 320, "run.seed": 1}
    FakeCluster(mine, mine).require_same(mine, "same config")
    differing = mine, mine | {"planning.m_mem": 272}
    words = "process 2 of 3: planning.m_mem is 272, but 320 in process 0; same config"
    with pytest.raises(InputError, match=words):
        FakeCluster(*differing).require_same(mine, "same config")
    with pytest.raises(InputError, match=r"process 1 of 2: run.seed is None, but 1"):
        FakeCluster({"planning.m_mem": 320}).require_same(mine, "same config")


def test_the_proxy_forwards_and_stays_open_when_its_target_closes():
    with socket.create_server(("127.0.0.1", 0)) as target:
        proxy = CoordinatorProxy(f"127.0.0.1:{target.getsockname()[1]}")
        host, port = proxy.address.split(":")
        with socket.create_connection((host, int(port))) as client:
            served, _ = target.accept()
            client.sendall(b"there")
            assert served.recv(9) == b"there"
            served.sendall(b"back")
            assert client.recv(9) == b"back"
            served.close()
            target.accept()  # the proxy has seen it, and looks who listens
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(9)


def test_another_number_of_processes_is_named():
    words = "cluster.processes is 3, but 2 in process 0"
    with pytest.raises(InputError, match=words):
        FakeCluster({}, {}, from_process_0=2).require_same({}, "same config")


def test_a_folder_that_only_one_host_has_is_named(tmp_path, monkeypatch):
    FakeCluster(True).require_shared("run.folder", tmp_path / "run")
    words = (
        r"run.folder is .*run: process 2 of 3 does not see the files that process 0 writes there"
    )
    with pytest.raises(InputError, match=words):
        FakeCluster(True, False).require_shared("run.folder", tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    monkeypatch.setattr("alload_jax.distributed.cluster._VISIBLE_SECONDS", 0.0)
    assert not _becomes_visible(tmp_path / "run" / ".shared-elsewhere")


@pytest.mark.parametrize(
    ("address", "alone"),
    [
        ("localhost:9", True),
        ("127.0.0.1:9", True),
        ("127.3.2.1:9", True),
        ("[::1]:9", True),
        ("host:9", False),
        ("10.0.0.1:9", False),
        ("0.0.0.0:9", False),
    ],
)
def test_only_loopback_addresses_are_of_this_host_alone(address, alone):
    assert is_loopback(address) == alone


@pytest.mark.parametrize(
    ("meant", "place"),
    [
        (["10.1.2.3"], "10.1.2.3:9"),
        (["fd00::1"], "[fd00::1]:9"),
        (["127.0.1.1"], None),
        (["0.0.0.0"], None),
        (["10.1.2.3", "10.1.2.4"], None),
        (["192.0.2.1"], None),
    ],
)
def test_process_0_listens_at_the_address_that_is_its_own(meant, place, monkeypatch):
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (m,)) for m in meant]
    )

    class Trial(socket.socket):
        def bind(self, where):
            if where[0] == "192.0.2.1":
                raise OSError

    monkeypatch.setattr(socket, "socket", Trial)
    assert bind_address("first-host:9") == place
    assert bind_address("localhost:9") == "localhost:9"
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.9.9.9:9")
    assert bind_address("first-host:9") is None
