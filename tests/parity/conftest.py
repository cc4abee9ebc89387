"""Live comparisons: collected only where they run, for their imports take long."""

import os
from importlib.util import find_spec

EXTRAS = ("torch", "diffusers", "transformers", "peft", "accelerate", "sentencepiece")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors; threads of each worker only wait


def pytest_ignore_collect(config):
    """The folder is left out without alload-jax[parity], and where the tier is not asked for."""
    left_out = "not parity" in config.option.markexpr
    return True if left_out or not all(map(find_spec, EXTRAS)) else None
