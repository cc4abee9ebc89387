import os
import signal
import sys
from pathlib import Path

import pytest

# Eight CPU devices, for tests of sharding; before JAX is imported. GPUs are not affected.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# Tests compile far longer than they compute.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

# What one test compiled, no other compiles again, nor does the next run of the tests.
COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


LONG = ("docs", "training", "plug_points", "bench", "models", "sharding", "pallas_kernels")
"""Folders whose files take longest."""


def pytest_collection_modifyitems(items):
    """Long files first, so that no worker is left with one at the end (--no-loadscope-reorder)."""
    here = Path(__file__).parent

    def place(item):
        folder = item.path.relative_to(here).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)


@pytest.fixture(autouse=True, scope="module")
def forget_compiled():
    """Frees a file's programs, among which later files would be traced more slowly."""
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()


@pytest.fixture
def default_signals():
    """SIGINT and SIGTERM as in a terminal, for this process and those that it starts.

    In a background job SIGINT is ignored, and child processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    before_term = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGTERM, before_term)
