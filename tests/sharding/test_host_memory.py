"""How much of the host's memory a device may use, and flags of XLA."""

import os
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import jax
import pytest

from alload_jax import processes
from alload_jax.bench.calibration import device_memory
from alload_jax.errors import InputError
from alload_jax.sharding import host_memory
from alload_jax.sharding.host_memory import DEFAULT_FLAGS, with_defaults
from alload_jax.training import trainer


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A function that says what /proc has of this process's control groups, and their files."""

    def of(lines="0::/", files=None):
        for name, content in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        (tmp_path / "groups").write_text(lines)
        monkeypatch.setattr(processes, "_GROUPS", tmp_path / "groups")
        monkeypatch.setattr(processes, "_MOUNT", tmp_path)

    return of


@pytest.fixture
def host(groups, tmp_path, monkeypatch):
    """A function that says the limit of the container and the GPUs of the host."""

    def of(limit, gpus, own=1, on_gpus=False):
        groups(files={} if limit is None else {"memory.max": f"{limit}\n"})
        for name in (*(f"nvidia{number}" for number in range(gpus)), "nvidiactl", "nvidia-uvm"):
            (tmp_path / name).touch()
        monkeypatch.setattr(host_memory, "_NODES", tmp_path)
        return host_memory.bytes_of_one(own, on_gpus=on_gpus)

    return of


def test_the_memory_or_a_lower_limit_of_the_container_is_shared(host):
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (None, "max", 1 << 62):
        assert host(limit, 0, own=2) == memory / 4
    assert host(8_000_000_000, 16) == 8e9 / 2 / 16
    if jax.default_backend() == "cpu":
        assert device_memory(None) == 8e9 / 2


FIRST = "4:memory:/slurm/job_7\n3:cpu,cpuacct:/docker/a\n0::/user.slice"
"""Lines of /proc: the first version's, beside the second's."""


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/", {}, 6),
        ("0::/", {"cpu.max": "max 100000"}, 6),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "20000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a:1", {"a:1/cpu.max": "200000 100000", "b/cpu.max": "100000 100000"}, 2),
        ("0::/../b", {"cpu.max": "300000 100000", "b/cpu.max": "100000 100000"}, 3),
        (FIRST, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 6),
        (FIRST, {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        (FIRST, {f"cpu/docker/a/cpu.cfs_{n}_us": "9" for n in ("quota", "period")}, 1),
    ],
)
def test_no_more_cpus_are_used_than_the_groups_may(lines, files, expected, groups, monkeypatch):
    groups(lines, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    assert processes.cpus() == expected
    shapes, pools = range(20), Mock(wraps=ThreadPoolExecutor)
    monkeypatch.setattr(trainer, "ThreadPoolExecutor", pools)
    assert list(trainer.in_parallel(lambda shape: -shape, shapes)) == [(n, -n) for n in shapes]
    assert pools.call_args.kwargs["max_workers"] == max(1, expected // 2)


@pytest.mark.parametrize(
    ("lines", "limited"),
    [
        ("0::/slurm/job_7/step_0/user", "slurm/job_7"),
        (FIRST, "memory/slurm/job_7"),
        (FIRST, "memory"),
    ],
)
def test_the_memory_of_a_job_is_that_of_its_groups(lines, limited, groups):
    name = "memory.limit_in_bytes" if "memory" in limited else "memory.max"
    groups(lines, {f"{limited}/{name}": "1000\n", f"other/{name}": "10"})
    assert host_memory.host_bytes() == 1000


def test_gpus_of_a_process_share_what_xla_may_use(host, monkeypatch):
    monkeypatch.setenv(host_memory.POOL, "1")
    assert host(None, 1, own=4, on_gpus=True) == 2**30 / 4
    monkeypatch.setenv(host_memory.POOL, "much")
    with pytest.raises(InputError, match="LIMIT_GB is 'much'; give a number of GiB"):
        host(None, 1, on_gpus=True)


@pytest.mark.parametrize(("gibibytes", "pool"), [(512, "256"), (96, None)])
def test_the_pool_grows_with_the_host(groups, monkeypatch, gibibytes, pool):
    groups()
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 2**30}.get(name, gibibytes))
    monkeypatch.delenv(host_memory.POOL, raising=False)
    host_memory.set_pool()
    assert os.environ.pop(host_memory.POOL, None) == pool


def test_defaults_are_added_to_the_flags_given_which_take_precedence():
    (name, value), *_ = DEFAULT_FLAGS.items()
    defaults = [f"--{n}={v}" for n, v in DEFAULT_FLAGS.items()]
    assert with_defaults("") == " ".join(defaults) == with_defaults(with_defaults(""))
    assert with_defaults("--xla_dump_to=there").split() == ["--xla_dump_to=there", *defaults]
    assert with_defaults("my/flags.txt") == "my/flags.txt"  # the path of a file of flags
    given = with_defaults(f"--{name}=false").split()
    assert given.count(f"--{name}=false") == 1
    assert f"--{name}={value}" not in given
