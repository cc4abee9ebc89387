"""The golden files that tests/parity/draw_hunyuan_video.py drew from diffusers."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from golden_files import golden_arrays

from alload_jax.models.common.embedding import ConditionTokens
from alload_jax.models.common.segments import segments_of
from alload_jax.models.families import read_model_config
from alload_jax.models.weights import load_weights
from alload_jax.sharding.mesh import MeshConfig, make_mesh

GOLDEN = Path(__file__).parents[2] / "golden" / "hunyuan_video"
CASES = sorted(folder.name for folder in GOLDEN.iterdir())
GLYPH_HIDDEN = 12


class Call(NamedTuple):
    """One call of the model; latents, cotangent and output as [B, F, H, W, C]."""

    latents: np.ndarray
    timestep: np.ndarray
    condition: dict[str, Any]
    cotangent: np.ndarray
    output: np.ndarray


def bucketed_tokens(values, lengths):
    """[B, L, width] with `lengths` tokens each."""
    lengths = np.asarray(lengths, np.int32)
    table = np.stack([np.zeros_like(lengths), lengths])[..., None]
    return ConditionTokens(values, segments_of(table, values.shape[1]))


def golden_calls(case):
    """The case's calls, and its gradients by diffusers' keys."""
    calls, grads = golden_arrays(GOLDEN / case)
    return [_call(arrays) for arrays in calls], grads


def _call(arrays):
    image = arrays["image"]
    lengths = {name: arrays[f"{name}_length"] for name in ("text", "glyphs")}
    lengths["image"] = [image.shape[1] if image.any() else 0] * len(image)
    condition = {name: bucketed_tokens(arrays[name], each) for name, each in lengths.items()}
    others = ("latents", "timestep", "cotangent", "output")
    return Call(condition=condition, **{name: arrays[name] for name in others})


def golden_config(case, **changes):
    config = read_model_config(GOLDEN / case / "transformer" / "config.json")
    changes = {"dtype": "float32", "glyph_hidden": GLYPH_HIDDEN} | changes
    return dataclasses.replace(config, **changes)


MESH = make_mesh(MeshConfig(data=1), jax.devices()[:1])


@functools.cache
def golden_params(case):
    return load_weights(GOLDEN / case / "transformer", golden_config(case), MESH)


def error_of(value, expected):
    """Relative to the norm of what is expected, but for gradients that are zero up to rounding.

    Those are of biases of keys without a norm, on which a softmax does not depend.
    """
    size = max(np.linalg.norm(expected), 1e-2)
    return np.linalg.norm(np.asarray(value) - expected) / size
