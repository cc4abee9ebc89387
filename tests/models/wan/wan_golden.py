"""The golden files that tests/parity/draw_wan.py drew from diffusers."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from golden_files import golden_arrays

GOLDEN = Path(__file__).parents[2] / "golden" / "wan"
CASES = sorted(folder.name for folder in GOLDEN.iterdir())


class Call(NamedTuple):
    """One call of the model; latents, cotangent and output as [B, F, H, W, C]."""

    latents: np.ndarray
    timestep: np.ndarray
    text: np.ndarray
    image: np.ndarray | None
    cotangent: np.ndarray
    output: np.ndarray


def golden_calls(case):
    """The case's calls, and its gradients by diffusers' keys."""
    calls, grads = golden_arrays(GOLDEN / case)
    return [Call(**({"image": None} | call)) for call in calls], grads
