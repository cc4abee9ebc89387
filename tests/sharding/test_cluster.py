import socket
import time

import pytest

from alload_jax.errors import InputError
from alload_jax.sharding.cluster import Cluster, ClusterConfig, join_cluster
from alload_jax.sharding.coordination import member_by_launcher
from alload_jax.sharding.relay import Relay

ALL = {"coordinator": "host:9", "processes": 2, "process": 0}

BAD = [
    ({"process": 1}, "cluster.coordinator and cluster.processes must be given too"),
    ({"coordinator": "host:9", "processes": 2}, "cluster.process must be given too"),
    (ALL | {"process": 2}, "cluster.process is 2; it must be 0 to 1"),
    (ALL | {"process": -1}, "cluster.process is -1"),
    (ALL | {"processes": 0}, "cluster.processes is 0"),
    (ALL | {"coordinator": "host"}, "give it as host:port"),
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
    assert join_cluster(ClusterConfig()).processes == 1


def test_open_mpi_that_tells_too_little_is_named(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(InputError, match=r"Open MPI: .* give --cluster.coordinator"):
        join_cluster(ClusterConfig())
    assert join_cluster(ClusterConfig(detect=False)).processes == 1


def test_slurm_says_who_the_processes_are(monkeypatch):
    step = {"STEP_NODELIST": "n[1-2]", "NTASKS": "4", "PROCID": "2", "LOCALID": "0", "JOB_ID": "7"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    member = member_by_launcher()
    assert member.coordinator.startswith("n1:")
    assert member[1:] == (4, 2, [0])


def test_a_lone_process_tells_and_gathers_its_own():
    with Cluster() as cluster:
        assert cluster.tell(lambda: 3) == 3
        assert cluster.gather("x") == ["x"]


def test_a_relay_passes_on_and_stays_open_when_its_target_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as target:
        relay = Relay(f"127.0.0.1:{target.getsockname()[1]}")
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
