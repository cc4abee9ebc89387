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
def host(tmp_path, monkeypatch):
    """A function that says the limit of the container and the GPUs of the host."""

    def of(limit, gpus, own=1, on_gpus=False):
        if limit is not None:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
        for name in (*(f"nvidia{number}" for number in range(gpus)), "nvidiactl", "nvidia-uvm"):
            (tmp_path / name).touch()
        monkeypatch.setattr(host_memory, "_LIMITS", (tmp_path / "memory.max",))
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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000"}, 6),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 6),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_no_more_cpus_are_used_than_the_container_may(files, expected, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    places = [tuple(tmp_path / path.name for path in paths) for paths in processes._QUOTAS]
    monkeypatch.setattr(processes, "_QUOTAS", places)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    assert processes.cpus() == expected
    shapes, pools = range(20), Mock(wraps=ThreadPoolExecutor)
    monkeypatch.setattr(trainer, "ThreadPoolExecutor", pools)
    assert list(trainer.in_parallel(lambda shape: -shape, shapes)) == [(n, -n) for n in shapes]
    assert pools.call_args.kwargs["max_workers"] == max(1, expected // 2)


def test_gpus_of_a_process_share_what_xla_may_use(host, monkeypatch):
    monkeypatch.setenv(host_memory.POOL, "1")
    assert host(None, 1, own=4, on_gpus=True) == 2**30 / 4
    monkeypatch.setenv(host_memory.POOL, "much")
    with pytest.raises(InputError, match="LIMIT_GB is 'much'; give a number of GiB"):
        host(None, 1, on_gpus=True)


@pytest.mark.parametrize(("gibibytes", "pool"), [(512, "256"), (96, None)])
def test_the_pool_grows_with_the_host(monkeypatch, gibibytes, pool):
    monkeypatch.setattr(host_memory, "_LIMITS", ())
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
