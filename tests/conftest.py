import os
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
