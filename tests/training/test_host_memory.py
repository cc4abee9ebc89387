"""How much of the host's memory a device may use."""

import os

import jax
import pytest

from alload_jax.training import host_memory


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A function that says the limit of the container and the GPUs of the host."""

    def of(limit, gpus):
        if limit is not None:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
        for name in (*(f"nvidia{number}" for number in range(gpus)), "nvidiactl", "nvidia-uvm"):
            (tmp_path / name).touch()
        monkeypatch.setattr(host_memory, "_LIMIT", tmp_path / "memory.max")
        monkeypatch.setattr(host_memory, "_NODES", tmp_path)
        return host_memory.host_budget()

    return of


def test_the_limit_of_a_container_counts(host):
    assert host(8_000_000_000, 16) == 8e9 / 2 / 16


@pytest.mark.parametrize("limit", [None, "max", 1 << 62])
def test_the_memory_counts_without_a_lower_limit(host, limit):
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host(limit, 0) == memory / 2 / jax.local_device_count()
