"""The golden files that tests/parity/draw_*.py drew from diffusers, as models and their calls."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from golden_files import golden_arrays

from alload_jax.models.common.embedding import ConditionTokens
from alload_jax.models.common.segments import segments_of
from alload_jax.models.families import abstract_model, read_model_config
from alload_jax.models.weights import load_weights
from alload_jax.sharding.mesh import MeshConfig, make_mesh

GOLDEN = Path(__file__).parents[1] / "golden"
WAN = [f"wan/{folder.name}" for folder in sorted((GOLDEN / "wan").iterdir())]
HUNYUAN = [f"hunyuan_video/{path.name}" for path in sorted((GOLDEN / "hunyuan_video").iterdir())]
WEIGHTS = "diffusion_pytorch_model.safetensors"
MESH = make_mesh(MeshConfig(data=1), jax.devices()[:1])
"""One device."""


class Call(NamedTuple):
    """One call of the model: its arguments, a cotangent and the output, as [B, F, H, W, C]."""

    arguments: tuple[Any, ...]
    cotangent: np.ndarray
    output: np.ndarray


def transformer(case):
    """The folder as diffusers writes it."""
    return GOLDEN / case / "transformer"


def golden_calls(case):
    """The case's calls, and its gradients by diffusers' keys."""
    calls, grads = golden_arrays(GOLDEN / case)
    return [_call(arrays) for arrays in calls], grads


def _call(arrays):
    condition = (arrays["text"], arrays.get("image"))
    if "glyphs" in arrays:
        image = arrays["image"]
        lengths = {name: arrays[f"{name}_length"] for name in ("text", "glyphs")}
        lengths["image"] = [image.shape[1] if image.any() else 0] * len(image)
        tokens = {name: _tokens(arrays[name], each) for name, each in lengths.items()}
        condition = (tokens,)
    arguments = (arrays["latents"], arrays["timestep"], *condition)
    return Call(arguments, arrays["cotangent"], arrays["output"])


def _tokens(values, lengths):
    """[B, L, width] with `lengths` tokens each."""
    lengths = np.asarray(lengths, np.int32)
    table = np.stack([np.zeros_like(lengths), lengths])[..., None]
    return ConditionTokens(values, segments_of(table, values.shape[1]))


def golden_config(case, **changes):
    config = read_model_config(transformer(case) / "config.json")
    own = {"glyph_hidden": 12} if case in HUNYUAN else {}
    return dataclasses.replace(config, **{"dtype": "float32"} | own | changes)


@functools.cache
def golden_params(case):
    return load_weights(transformer(case), golden_config(case), MESH)


def outputs_of(case, calls, **changes):
    """Each call by itself; those of one shape by one program."""
    graph = abstract_model(golden_config(case, **changes)).graph
    run = jax.jit(lambda params, *inputs: nnx.merge(graph, params)(*inputs))
    return [run(golden_params(case), *call.arguments) for call in calls]


def error_of(value, expected):
    """Relative to the norm of what is expected, but for gradients that are zero up to rounding.

    Those are of biases of keys without a norm, on which a softmax does not depend.
    """
    size = max(np.linalg.norm(expected), 1e-2)
    return np.linalg.norm(np.asarray(value) - expected) / size
