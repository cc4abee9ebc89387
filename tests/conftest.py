import os
import signal
import sys

import pytest

# Eight CPU devices, for tests of sharding; before JAX is imported. GPUs are not affected.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# Tests compile far longer than they compute.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")


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
