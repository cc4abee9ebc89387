"""Draws the samples of `alload sample` and writes them."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.commands.model_source import FolderSource, RunSource
from alload_jax.diffusion.schedules import Sampler
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.sampling import flow
from alload_jax.sampling.conditions import RequestArrays, arrays_of, decoded, stacked
from alload_jax.sampling.encoders import Encoders
from alload_jax.sampling.pictures import LATENTS, write_clip
from alload_jax.sampling.requests import Request
from alload_jax.training.device_memory import out_of_memory
from alload_jax.training.restore import one_device_mesh

Source = RunSource | FolderSource


class Group(NamedTuple):
    """Requests that are drawn by one compiled program.

    Attributes:
      requests: requests of one shape.
      shift: shift of the noise levels.
      sigmas: [steps + 1] noise levels.
      timesteps: [steps] rounded timesteps; None for those of the noise levels.
    """

    requests: list[Request]
    shift: float
    sigmas: np.ndarray
    timesteps: np.ndarray | None


class Drawing(NamedTuple):
    """How samples are drawn and written; the fields are flags of `alload sample`.

    Attributes:
      low_noise: the second of two experts; None for one model.
      dtype: compute dtype; None for the config's.
      dense: whether all layers have dense attention.
      fps: frames per second; None for the default.
    """

    steps: int
    sampler: Sampler
    guidance: float
    low_noise: flow.LowNoise | None
    batch: int
    dtype: Literal["auto", "float32", "bfloat16"] | None
    dense: bool
    zoom: int
    fps: float | None


def draw(
    groups: Sequence[Group],
    drawing: Drawing,
    sources: tuple[Source, Source | None],
    encoders: Encoders,
) -> None:
    """Encodes what requests name, reads the weights, then draws and writes each batch.

    Args:
      groups: the requests.
      drawing: how they are drawn.
      sources: the model, and the second of two experts.
      encoders: the encoders that there are.

    Raises:
      InputError: a sample is not finite, does not fit the memory or cannot be written.
    """
    config = _config(sources[0].config, drawing)
    arrays = {
        request.out: arrays_of(request, config, encoders)
        for group in groups
        for request in group.requests
    }
    encoders.unload()  # only the VAE is used from here on
    mesh = one_device_mesh()
    values = [source.values(mesh) for source in sources if source is not None]
    failed: list[str] = []
    for group in groups:
        program = jax.jit(
            flow.make_flow(
                config,
                drawing.sampler,
                group.sigmas,
                drawing.guidance,
                drawing.low_noise,
                group.timesteps,
            )
        )
        weights = values[0] if drawing.low_noise is None else tuple(values)
        for part in _batches(group.requests, drawing.batch):
            filled = part + part[-1:] * (drawing.batch - len(part))
            with _memory_named(part[0]):
                inputs = _inputs(filled, [arrays[each.out] for each in filled], config)
                drawn = np.asarray(program(weights, *inputs))
            for request, clip in zip(part, drawn, strict=False):
                if np.isfinite(clip).all():
                    _write(request, clip, drawing, group.shift, encoders)
                else:
                    failed.append(str(request.out))
    if failed:
        raise InputError(
            f"{', '.join(failed)}: the model's output is not finite; choose another checkpoint, or "
            "a guidance closer to 1"
        )


def _config(config: ModelConfig, drawing: Drawing) -> ModelConfig:
    config = dataclasses.replace(config, dtype=drawing.dtype or config.dtype)
    if drawing.dense and config.sparse_attention is not None:
        return dataclasses.replace(config, sparse_attention=config.sparse_attention.as_dense())
    return config


def _write(
    request: Request, clip: np.ndarray, drawing: Drawing, shift: float, encoders: Encoders
) -> None:
    """Decodes a sample where it is to be a picture, and writes it."""
    if request.out.suffix.lower() != LATENTS:
        clip = decoded(clip, request, encoders.vae)
    guidance = float(drawing.guidance)
    notes = {"steps": drawing.steps, "sampler": drawing.sampler, "guidance": guidance}
    notes |= {"seed": request.seed, "shift": float(shift)}
    write_clip(request.out, clip, notes, drawing.zoom, drawing.fps)
    print(request.out, flush=True)


@contextmanager
def _memory_named(request: Request) -> Iterator[None]:
    """Turns JAX's out-of-memory error into an InputError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        raise InputError(
            f"{request.out}: latents of {request.grid} do not fit this device's memory; choose a "
            "smaller size or --batch"
        ) from error


def _inputs(
    requests: Sequence[Request], arrays: Sequence[RequestArrays], config: ModelConfig
) -> tuple[jax.Array, flow.Condition, flow.Condition]:
    """Noise, condition and null condition of a batch; each row depends only on its request."""
    shape = (*requests[0].grid, config.latent_channels)
    noise = jnp.stack([jax.random.normal(jax.random.key(r.seed), shape) for r in requests])
    return (noise, *stacked(arrays))


def _batches(requests: list[Request], size: int) -> Iterator[list[Request]]:
    for begin in range(0, len(requests), size):
        yield requests[begin : begin + size]
