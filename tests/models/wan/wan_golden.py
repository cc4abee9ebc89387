"""The golden files that tests/parity/draw_wan.py drew from diffusers."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy

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
    inputs = safetensors.numpy.load_file(GOLDEN / case / "inputs.safetensors")
    expected = safetensors.numpy.load_file(GOLDEN / case / "expected.safetensors")
    count = sum(name.endswith(".latents") for name in inputs)
    calls = [
        Call(
            latents=channels_last(inputs[f"{n}.latents"]),
            timestep=inputs[f"{n}.timestep"],
            text=inputs[f"{n}.text"],
            image=inputs.get(f"{n}.image"),
            cotangent=channels_last(inputs[f"{n}.cotangent"]),
            output=channels_last(expected[f"{n}.output"]),
        )
        for n in range(count)
    ]
    grads = {k.removeprefix("grad."): v for k, v in expected.items() if k.startswith("grad.")}
    return calls, grads


def channels_last(x):
    return np.moveaxis(x, 1, -1)
