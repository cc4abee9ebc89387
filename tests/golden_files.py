"""Reads the golden files that tests/parity/draw_*.py drew from diffusers."""

import re

import numpy as np
import safetensors.numpy


def golden_arrays(folder):
    """The arrays of a case: those of each call by name, and gradients by diffusers' keys.

    Latents, cotangent and output are [B, F, H, W, C].
    """
    inputs, expected = (
        safetensors.numpy.load_file(folder / f"{name}.safetensors")
        for name in ("inputs", "expected")
    )
    gradients = {k.removeprefix("grad."): v for k, v in expected.items() if k.startswith("grad.")}
    calls = {}
    for key, value in (inputs | expected).items():
        if found := re.fullmatch(r"(\d+)\.(\w+)", key):
            spatial = found[2] in ("latents", "cotangent", "output")
            named = calls.setdefault(int(found[1]), {})
            named[found[2]] = np.moveaxis(value, 1, -1) if spatial else value
    return [calls[number] for number in sorted(calls)], gradients
