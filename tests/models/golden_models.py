"""The golden files that tests/parity/draw_*.py drew from diffusers, as models and their calls."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from golden_files import golden_arrays

from alload_jax.models.common.embedding import ConditionTokens
from alload_jax.models.common.parts import patchify, unpatchify
from alload_jax.models.common.segments import PackedMetadata, segments_of
from alload_jax.models.common.sublayers import grid_positions
from alload_jax.models.families import abstract_model, read_model_config
from alload_jax.models.weights import load_weights
from alload_jax.sharding.mesh import MeshConfig, make_mesh

GOLDEN = Path(__file__).parents[1] / "golden"
WAN = [f"wan/{folder.name}" for folder in sorted((GOLDEN / "wan").iterdir())]
HUNYUAN = [f"hunyuan_video/{path.name}" for path in sorted((GOLDEN / "hunyuan_video").iterdir())]
HUNYUAN_13B = [
    f"hunyuan_video_13b/{path.name}" for path in sorted((GOLDEN / "hunyuan_video_13b").iterdir())
]
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
    if "pooled" in arrays:
        lengths = {"text": arrays["text_length"], "pooled": [1] * len(arrays["pooled"])}
        arrays["pooled"] = arrays["pooled"][:, None]
        condition = ({name: _tokens(arrays[name], each) for name, each in lengths.items()},)
    arguments = (arrays["latents"], arrays["timestep"], *condition)
    return Call(arguments, arrays["cotangent"], arrays["output"])


def _tokens(values, lengths):
    """[B, L, width] with `lengths` tokens each."""
    lengths = np.asarray(lengths, np.int32)
    table = np.stack([np.zeros_like(lengths), lengths])[..., None]
    return ConditionTokens(values, segments_of(table, values.shape[1]))


class Packed(NamedTuple):
    """The samples of calls in one row, with a gap behind each, and the (offset, length) of each."""

    arguments: tuple[Any, ...]
    places: list[tuple[int, int]]

    def latents(self, case, calls, tokens):
        """The parts of tokens [1, T, ...] that are the samples of each call, as latents."""
        found = iter([tokens[0, at : at + length] for at, length in self.places])
        for call in calls:
            together = jnp.stack([next(found) for _ in call.output])
            yield unpatchify(together, call.output.shape, golden_config(case).patch_size)


def packed(case, calls):
    """The calls as the arguments of `forward_packed`."""
    config, slots = golden_config(case), sum(len(call.output) for call in calls)
    patches = [patchify(call.arguments[0], config.patch_size) for call in calls]
    conditions = [call.arguments[2] for call in calls]
    if config.joint_attention:  # each sample has room for its condition behind it
        condition = {name: _in_slots([each[name] for each in conditions]) for name in conditions[0]}
        rooms = sum(part.segments.length[0] for part in condition.values())
        others, of_condition = (condition,), condition["text"].segments
    else:
        text = _in_slots([_tokens(each, [each.shape[1]] * len(each)) for each in conditions])
        rooms, of_condition = np.zeros(slots, np.int32), text.segments
        images = [call.arguments[3] for call in calls]
        image = None if images[0] is None else np.concatenate(images)[None]
        others = (text.values, image)
    grids = [_grid(config, call) for call in calls]
    counts = [part.shape[1] for part in patches for _ in part]
    ends = np.cumsum(np.array(counts) + rooms + 1)
    places = [
        (int(end - n - room - 1), n) for end, n, room in zip(ends, counts, rooms, strict=True)
    ]
    tokens = np.zeros((1, ends[-1], patches[0].shape[-1]), np.float32)
    positions = np.zeros((1, ends[-1], 3), np.int32)
    of_samples = ((x, grid) for part, grid in zip(patches, grids, strict=True) for x in part)
    for (at, length), (values, grid) in zip(places, of_samples, strict=True):
        tokens[0, at : at + length] = values
        positions[0, at : at + length] = grid_positions(*grid)
    metadata = PackedMetadata(
        *(segments_of(np.array(places, np.int32).T[:, None], int(ends[-1])), of_condition, None),
        grid=tuple(np.max(grids, axis=0).tolist()),
        lengths=((0, slots), (int(max(np.array(counts) + rooms)), 0)),
        longest_condition=of_condition.ids.shape[1],
    )
    timestep = np.concatenate([call.arguments[1] for call in calls])[None]
    return Packed((tokens, positions, metadata, timestep, *others), places)


def _in_slots(parts):
    """Tokens of bucketed rows one behind another in a single row."""
    values = np.concatenate([np.concatenate(part.values) for part in parts])[None]
    length = np.concatenate([part.segments.length[:, 0] for part in parts])
    room = [part.values.shape[1] for part in parts for _ in part.values]
    offset = np.cumsum([0, *room[:-1]])
    table = np.stack([offset, length]).astype(np.int32)[:, None]
    return ConditionTokens(values, segments_of(table, values.shape[1]))


def _grid(config, call):
    sizes = zip(call.arguments[0].shape[1:4], config.patch_size, strict=True)
    return [size // patch for size, patch in sizes]


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
