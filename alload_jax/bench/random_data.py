"""A data folder of samples of given sizes with random latents and conditions, for measurements."""

import math
from pathlib import Path

import numpy as np

from alload_jax.data.condition import form_for
from alload_jax.data.store import StoreWriter
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.samples import Geometry, Samples


def write_random_store(
    folder: Path, samples: Samples, model: ModelConfig, text_tokens: int | None = None
) -> None:
    """Writes a data folder of random latents and conditions.

    The latents of every sample are the beginning of one random array. Samples have all tokens of
    each further kind of condition.

    Args:
      folder: to make.
      samples: their sizes and weights.
      model: whose channels and conditions the data have.
      text_tokens: of each text; None for as many as the model takes.

    Raises:
      InputError: the folder exists, or cannot be written.
    """
    rng, form, stride = np.random.default_rng(0), form_for(model), Geometry().vae_stride
    dtype, channels = model.compute_dtype, model.latent_channels
    lengths = {part.name: (part.length, part.width) for part in model.condition_parts()}
    parts = {
        name: rng.standard_normal(lengths[name], np.float32).astype(dtype) for name, _ in form.parts
    }
    condition = np.zeros(1, np.int32)
    if model.text:
        text = rng.standard_normal((model.text.length, model.text.dim), np.float32)
        condition = text[:text_tokens].astype(dtype)
    image = None
    if form.image_shape is not None:
        image = rng.standard_normal(form.image_shape, np.float32)
    grids = Geometry(stride).latent_grid(*samples.shape.T).tolist()
    latents = rng.standard_normal(channels * max(map(math.prod, grids)), np.float32)
    with StoreWriter(folder, vae_stride=stride) as writer:
        weights = np.ones(len(samples)) if samples.weight is None else samples.weight
        for size, grid, weight in zip(samples.shape.tolist(), grids, weights, strict=True):
            shape = (*grid, channels)
            given = np.zeros((*grid, form.given_channels), np.float32)
            writer.add(
                latents[: math.prod(shape)].reshape(shape),
                condition,
                tuple(size),
                given=given if form.given_channels else None,
                image=image,
                parts=parts or None,
                weight=float(weight),
            )
