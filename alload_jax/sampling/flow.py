"""Sampling from a model: the flow from noise to data under conditions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from alload_jax.diffusion.flow import TIMESTEP_SCALE
from alload_jax.diffusion.samplers import guided, sample
from alload_jax.diffusion.schedules import Sampler
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import abstract_model


class Condition(NamedTuple):
    """The conditions of a model beside latents and timestep.

    Attributes:
      tokens: [B, L] int32 classes, or [B, L, text.dim] float32 text embeddings.
      image: [B, N, image.dim] float32 image embeddings; None if the model takes none.
    """

    tokens: Any
    image: Any = None


Flow = Callable[[Any, Any, Condition, Condition], jax.Array]
"""(values of a model, noise [B, frames, height, width, channels], condition, null condition) →
data of the noise's shape."""


def make_flow(config: ModelConfig, sampler: Sampler, sigmas: np.ndarray, guidance: float) -> Flow:
    """Builds a function that integrates the flow from noise to data; it works inside `jax.jit`.

    Args:
      config: config of the model.
      sampler: integration method.
      sigmas: [steps + 1] noise levels; see `alload_jax.diffusion.schedules.noise_levels`.
      guidance: scale of classifier-free guidance; 1 is none and ignores the null condition.
    """
    graph = abstract_model(config).graph

    def draw(values: Any, noise: Any, condition: Condition, null: Condition) -> jax.Array:
        def velocity(latents: jax.Array, sigma: jax.Array, condition: Condition) -> jax.Array:
            model = nnx.merge(graph, values)
            timestep = sigma * TIMESTEP_SCALE
            return model.forward(latents, timestep, condition.tokens, condition.image).velocity

        return sample(sampler, guided(velocity, null, guidance), noise, condition, sigmas)

    return draw
