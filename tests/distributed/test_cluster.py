"""Processes find each other, wait for each other, agree, and end like a single one."""

import contextlib
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import PATIENCE, free_port, wait_until

from alload_jax import config as config_module
from alload_jax.config import use_compilation_cache
from alload_jax.distributed import cluster as cluster_module
from alload_jax.distributed import coordination
from alload_jax.distributed import initialize as initialize_module
from alload_jax.distributed.cluster import Cluster
from alload_jax.distributed.coordination import (
    bind_address,
    is_loopback,
    process_info_from_launcher,
    still_listens,
)
from alload_jax.distributed.initialize import ClusterConfig, initialize
from alload_jax.errors import InputError, Terminated
from alload_jax.training import RunConfig

ALL = {"coordinator": "host:9", "processes": 2, "process": 0}
BAD = [
    ({"process": 1}, "cluster.coordinator and cluster.processes must be given too"),
    ({"coordinator": "host:9", "processes": 2}, "cluster.process must be given too"),
    (ALL | {"process": 2}, "cluster.process is 2; it must be 0 to 1"),
    (ALL | {"coordinator": "host"}, "give it as host:port"),
    (ALL | {"coordinator": "host:65536"}, "cluster.coordinator is host:65536; ports are 1 to"),
    (ALL | {"coordinator": "host:0"}, "ports are 1 to"),
]
SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SINGLE = [
    {},
    # A shell in an allocation or a batch script's first node, and `srun -n1 --pty bash`.
    SLURM | {"SLURM_NTASKS": "4"},
    SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1"},
    {"OMPI_COMM_WORLD_SIZE": "1"},
    {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
]
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("given", "words"), BAD)
def test_flags_that_contradict_are_named(given, words):
    with pytest.raises(InputError, match=words):
        ClusterConfig(**given)
    for good in (ALL, ALL | {"process": 1, "coordinator": "host:65535"}, {"lost_after": 2.0}):
        ClusterConfig(**good)


@pytest.mark.parametrize("environment", SINGLE)
def test_a_single_process_is_a_cluster_of_one(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with initialize(ClusterConfig(), ".") as cluster:
        assert cluster.num_processes == 1
        assert cluster.broadcast(lambda: 3) == 3
        assert cluster.all_gather("x") == ["x"]
    with pytest.raises(InputError, match=r"cluster\.certificates is keys, and the run has one"):
        initialize(ClusterConfig(certificates="keys"), ".")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"Open MPI: .* give --cluster.coordinator"),
        ({"SLURM_STEP_NUM_TASKS": "abc"}, r"SLURM_STEP_NUM_TASKS is 'abc'"),
        ({"WORLD_SIZE": "4"}, "but RANK is not set, .* give --cluster.coord"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR '' .* give --cluster.coordinator"),
        (TORCHRUN | {"RANK": "4"}, "RANK 4, MASTER_ADDR 'n1' .* which is no process of a run"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT '65536', which is no process of a run"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT is 'x'; it must be a number"),
    ],
)
def test_an_incomplete_environment_of_a_launcher_is_named(environment, words, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words):
        initialize(ClusterConfig(), ".")
    assert initialize(ClusterConfig(detect=False), ".").num_processes == 1


def test_slurm_s_environment_identifies_the_process(monkeypatch):
    step = {"STEP_NODELIST": "n[1-2]", "NTASKS": "4", "PROCID": "2", "LOCALID": "0", "JOB_ID": "7"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    process = process_info_from_launcher()
    assert process.coordinator_address.startswith("n1:")
    assert process[1:] == (4, 2, [0])
    # Scripts often set ranks for PyTorch, and not which GPUs a task has.
    ranks = {"STEP_NUM_TASKS": "4"} | {"WORLD_SIZE": "4", "RANK": "2"} | {"MASTER_ADDR": "n1"}
    for name, value in ranks.items():
        monkeypatch.setenv(f"SLURM_{name}" if name.startswith("STEP") else name, value)
    assert initialize_module._process_info(ClusterConfig()) == process


@pytest.mark.parametrize(
    ("more", "process"),
    [
        ({}, ("n1:29500", 4, 2, None)),  # one per host, as Kubernetes' PyTorchJob starts them
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ("n1:29500", 4, 2, [1])),
        (AGENT | {"MASTER_ADDR": "::1"}, ("[::1]:29501", 4, 2, None)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, ("n1:29500", 4, 2, None)),
    ],
)
def test_torchruns_environment_identifies_the_process(more, process, monkeypatch):
    for name, value in (TORCHRUN | more).items():
        monkeypatch.setenv(name, value)
    found = []
    monkeypatch.setattr(initialize_module, "connect", lambda process, *_: found.append(process))
    monkeypatch.setattr(initialize_module, "agree_on_seal", lambda *_: sys.exit("connected"))
    monkeypatch.setattr(initialize_module.os, "dup2", lambda *_: None)
    with pytest.raises(SystemExit, match="connected"):
        initialize(ClusterConfig(), ".")
    assert found == [process]


def test_kubeflows_variables_identify_the_process(monkeypatch):
    given = {"COORDINATOR_ADDRESS": "alload-node-0-0.alload:29500", "NUM_PROCESSES": "2"}
    for name, value in (given | {"PROCESS_ID": "1"}).items():
        monkeypatch.setenv(f"JAX_{name}", value)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")  # which JAX would ask Kubernetes about
    found = initialize_module._process_info(ClusterConfig())
    assert found == ("alload-node-0-0.alload:29500", 2, 1, None)
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(InputError, match="JAX_NUM_PROCESSES is '2', JAX_PROCESS_ID is '2', which"):
        initialize_module._process_info(ClusterConfig())
    monkeypatch.delenv("JAX_PROCESS_ID")
    with pytest.raises(InputError, match=r"JAX_PROCESS_ID is None, which .*--cluster.coordinator"):
        initialize_module._process_info(ClusterConfig())
    assert initialize_module._process_info(ClusterConfig(detect=False)) is None
    # One host needs no rights to ask Kubernetes about its pods.
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert initialize_module._process_info(ClusterConfig()) is None


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        coordinator = f"localhost:{taken.getsockname()[1]}"
        config = ClusterConfig(coordinator=coordinator, processes=2, process=0)
        with pytest.raises(InputError, match=rf"{coordinator}, but process 0 cannot listen there"):
            initialize(config, ".")


WAITS = """
import os, signal, socket, sys, threading
from alload_jax.distributed import initialize
from alload_jax.errors import run_command

def send_signals(numbers):
    for number in numbers:
        attempts.acquire()  # JAX connects, and again a while after the signal before
        os.kill(os.getpid(), number)

def create_connection(*arguments, **options):
    attempts.release()
    return real_create_connection(*arguments, **options)

def wait(folder, coordinator, handler, *numbers):
    os.dup2(os.open(folder, os.O_WRONLY | os.O_CREAT), 2)
    threading.Thread(target=send_signals, args=[numbers], daemon=True).start()
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    config = initialize.ClusterConfig(coordinator=coordinator, processes=2, process=1)
    os._exit(run_command(lambda _: initialize.initialize(config, "."), []))

attempts = threading.Semaphore(0)
real_create_connection, socket.create_connection = socket.create_connection, create_connection
cases = (
    ("localhost:9", signal.default_int_handler, signal.SIGINT),
    ("localhost:9", signal.SIG_IGN, signal.SIGINT, signal.SIGTERM),
    ("nohost.invalid:9", signal.default_int_handler),
)
for number, case in enumerate(cases):
    if "nohost" in case[0]:
        initialize.CONNECT_SECONDS, initialize._SILENT_SECONDS = 1.0, 0.2
        initialize._SECONDS_BETWEEN_LOOKS = 0.5
    if (child := os.fork()) == 0:
        wait(os.path.join(sys.argv[1], str(number)), *case)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_waiting_processes_end_on_ctrl_c_or_sigterm_or_after_a_while_with_one_line(tmp_path):
    """A background job ignores Ctrl-C; each process is forked, so that JAX is imported once."""
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["130", str(-signal.SIGTERM), "2"], done.stderr
    ctrl_c, background, alone = ((tmp_path / str(n)).read_text().splitlines() for n in range(3))
    assert (ctrl_c, background) == (["interrupted"], [])
    waits, gives_up = alone
    assert waits.startswith("waiting for the other processes at nohost.invalid:9: nohost.invalid: ")
    words = "error: process 1 of 2 could not connect to the others at nohost.invalid:9"
    assert gives_up.startswith(words)


JOINS = """
import os, sys
from alload_jax.distributed import initialize
from alload_jax.errors import run_command

def takes_connections(address):
    if taken := real_takes_connections(address):
        print("joined", flush=True)
    return taken

real_takes_connections = initialize.takes_connections
initialize.takes_connections = takes_connections
config = initialize.ClusterConfig(coordinator=sys.argv[1], processes=3, process=int(sys.argv[2]))
os._exit(run_command(lambda _: initialize.initialize(config, "."), []))
"""


@pytest.mark.slow
def test_the_end_of_process_0_ends_those_that_wait_for_more(default_signals):
    coordinator = f"localhost:{free_port()}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first, second = (
        subprocess.Popen([sys.executable, "-c", JOINS, coordinator, n], **pipes) for n in "01"
    )
    assert second.stdout.readline() == "joined\n"  # both wait for the third
    first.kill()
    first.communicate()
    _, said = second.communicate(timeout=PATIENCE)
    assert second.returncode == 2
    (line,) = said.strip().splitlines()
    assert "(because process 0 has ended)" in line


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
    cluster.heartbeat = EndsAtOnce()
    reports = cluster.report_failures() if reported else contextlib.nullcontext()
    with pytest.raises(SystemExit) as end, cluster, reports:
        raise error
    assert end.value.code == status
    assert capsys.readouterr().err == said
    assert cluster.heartbeat.error is error


class FakeCluster(Cluster):
    """A cluster whose other processes, and process 0 if it is another, have the given values."""

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
    for cluster, words in (
        (
            FakeCluster(mine, mine | {"planning.m_mem": 272}),
            "2 of 3: .*m_mem is 272, but 320 .*; same",
        ),
        (FakeCluster({"planning.m_mem": 320}), r"process 1 of 2: run.seed is None, but 1"),
        (FakeCluster({}, {}, from_process_0=2), "cluster.processes is 3, but 2 in process 0"),
    ):
        with pytest.raises(InputError, match=words):
            cluster.require_same(mine, "same config")


class Store(dict):
    """What two threads share that stand for processes."""

    put = dict.__setitem__

    def wait_for(self, key):
        wait_until(lambda: key in self)
        return self[key]


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        *(("one", "one", True), (None, None, True), ("file/in", "file/in", False)),
        ("one", "other", False),  # one path on disks of their own
        *(("one", None, False), (None, "one", False)),
    ],
)
def test_programs_are_kept_only_where_all_processes_see_them(
    first, second, shared, tmp_path, monkeypatch, capsys
):
    """Where some find a program, those that compile it would wait for them in XLA for a day."""
    monkeypatch.setattr(cluster_module, "_SEEN_SECONDS", 0.3)
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    settings, store = {"jax_compilation_cache_dir": None}, Store()
    kept = SimpleNamespace(update=settings.__setitem__, values=settings)
    monkeypatch.setattr(config_module, "jax", SimpleNamespace(config=kept))
    clusters = [Cluster(), Cluster()]
    for process, cluster in enumerate(clusters):
        cluster.process_id, cluster.num_processes, cluster.store = process, 2, store
    folders = [place and tmp_path / place for place in (first, second)]
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(Cluster.shares, clusters, folders))
    assert found == [shared] * 2
    assert not list(tmp_path.rglob(".shared*"))
    assert (store["broadcast/1"] == '""') is (first in (None, "file/in"))  # nobody looks in vain
    run = RunConfig("run", compilation_cache=str(folders[0] or tmp_path))
    place = Path(run.compilation_cache)
    told = SimpleNamespace(process_id=0, shares=lambda folder: shared and folder == place)
    use_compilation_cache(run, told)
    assert settings["jax_compilation_cache_dir"] == (str(place) if shared else None)
    assert (f"process 0 writes to {place};" in capsys.readouterr().err) is not shared


def test_only_loopback_addresses_are_of_this_host_alone():
    for host in ("localhost", "127.0.0.1", "127.3.2.1", "[::1]"):
        assert is_loopback(f"{host}:9")
    for host in ("host", "10.0.0.1", "0.0.0.0"):
        assert not is_loopback(f"{host}:9")


@pytest.mark.parametrize(
    ("meant", "place"),
    [
        *((["10.1.2.3"], "10.1.2.3:9"), (["fd00::1"], "[fd00::1]:9"), (["127.0.1.1"], None)),
        *((["0.0.0.0"], None), (["10.1.2.3", "10.1.2.4"], None), (["192.0.2.1"], None)),
    ],
)
def test_process_0_listens_at_the_address_that_is_its_own(meant, place, monkeypatch):
    class Trial(socket.socket):
        def bind(self, where):
            if where[0] == "192.0.2.1":
                raise OSError

    found = [(0, 0, 0, "", (each,)) for each in meant]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", Trial)
    assert bind_address("first-host:9") == place
    assert bind_address("localhost:9") == "localhost:9"
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.9.9.9:9")
    assert bind_address("first-host:9") is None


@pytest.fixture
def probed(monkeypatch):
    """What listens for process 0, and what happens after so many probes of it."""
    probes = SimpleNamespace(count=0, then={})

    def sleep(_):
        probes.count += 1
        probes.then.get(probes.count, lambda: None)()

    monkeypatch.setattr(coordination, "_PROBE_SECONDS", PATIENCE)
    monkeypatch.setattr(coordination, "time", SimpleNamespace(sleep=sleep))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        yield SimpleNamespace(server=server, address=address, probes=probes)


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_process_that_ends_listens_no_more_whichever_of_its_sockets_closes_first(
    probed, answered
):
    # A process that ends closes one descriptor after the other.
    if answered:
        probed.probes.then[answered] = probed.server.close
    else:
        probed.server.close()
    assert not still_listens(probed.address)
    assert probed.probes.count == answered + 3


@pytest.mark.parametrize("refused", [0, 1])
def test_a_process_that_closes_a_connection_may_still_listen(probed, refused):
    if refused:  # once, as by a firewall
        address = probed.server.getsockname()
        probed.server.close()
        probed.probes.then[refused] = lambda: vars(probed).update(
            server=socket.create_server(address)
        )
    assert still_listens(probed.address)
    assert probed.probes.count == refused + 3
    probed.server.close()
