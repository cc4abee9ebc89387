"""Sampling from a model: the flow from noise to data under conditions."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from alload_jax.diffusion.samplers import guided, sample
from alload_jax.diffusion.schedules import Sampler
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.embedding import TIMESTEP_SCALE
from alload_jax.models.families import abstract_model

Array = jax.Array | np.ndarray


class Condition(NamedTuple):
    """The conditions of a model beside latents and timestep.

    Attributes:
      tokens: [B, L] int32 classes, [B, L, text.dim] float32 text embeddings, or `ConditionTokens`
        by name for models that declare `condition_parts`.
      image: [B, N, image.dim] float32 image embeddings; None if the model takes none.
      given: [B, frames, height, width, G] float32 input channels behind the noisy latents; None if
        the model takes none.
      first_frame: [B, 1, height, width, C] float32, the first latent frame; None to draw it.
    """

    tokens: PyTree
    image: Array | None = None
    given: Array | None = None
    first_frame: Array | None = None


Flow = Callable[[PyTree, PyTree, Condition, Condition], PyTree]
"""(values of a model, noise [B, frames, height, width, channels], condition, null condition) →
data of the noise's shape. Of a part of the steps it takes and returns the state between steps."""


def make_flow(
    config: ModelConfig,
    sampler: Sampler,
    sigmas: np.ndarray,
    guidance: float,
    timesteps: np.ndarray | None = None,
    steps: slice = slice(None),
) -> Flow:
    """Builds a function that integrates the flow from noise to data; it works inside `jax.jit`.

    Args:
      config: config of the model.
      sampler: integration method.
      sigmas: [steps + 1] noise levels; see `alload_jax.diffusion.schedules.noise_levels`.
      guidance: scale of classifier-free guidance; 1 is none and ignores the null condition.
      timesteps: [steps], what the model takes for 1000·σ at each noise level but the last; None for
        that itself.
      steps: the steps that it takes, as `alload_jax.diffusion.samplers.sample` does.
    """
    graph = abstract_model(config).graph

    def timestep_of(sigma: jax.Array) -> jax.Array:
        if timesteps is None:
            return sigma * TIMESTEP_SCALE
        step = jnp.argmin(jnp.abs(jnp.asarray(sigmas[:-1]) - sigma[..., None]), axis=-1)
        return jnp.asarray(timesteps)[step]

    def predict(
        values: PyTree, latents: jax.Array, sigma: jax.Array, given: Condition
    ) -> jax.Array:
        timestep, first = timestep_of(sigma), None
        if given.first_frame is not None:
            latents, first = _with_first(latents, given), jnp.zeros_like(timestep)
        if given.given is not None:
            latents = jnp.concatenate([latents, given.given], axis=-1)
        model = nnx.merge(graph, values)
        options = {"image": given.image, "first_frame_timestep": first}
        present = {name: value for name, value in options.items() if value is not None}
        return model.forward(latents, timestep, given.tokens, **present).velocity

    def draw(values: PyTree, noise: PyTree, condition: Condition, null: Condition) -> PyTree:
        velocity = guided(partial(predict, values), null, guidance)
        drawn = sample(sampler, velocity, noise, condition, sigmas, steps)
        is_data = steps.stop is None and condition.first_frame is not None
        return _with_first(drawn, condition) if is_data else drawn

    return draw


def make_expert_flows(
    config: ModelConfig,
    sampler: Sampler,
    sigmas: np.ndarray,
    guidances: tuple[float, float],
    below: float,
    timesteps: np.ndarray | None = None,
) -> list[Flow]:
    """The flows of two experts, as in Wan 2.2's A14B models: the second takes what the first gives.

    Args:
      config: config of both models.
      sampler, sigmas, timesteps: as of `make_flow`.
      guidances: of each, the scale of classifier-free guidance.
      below: the second takes noise levels below this one, by the timesteps that the model sees.
    """
    levels = sigmas[:-1] if timesteps is None else timesteps / TIMESTEP_SCALE
    above = int((levels >= below).sum())
    return [
        make_flow(config, sampler, sigmas, guidance, timesteps, steps)
        for guidance, steps in zip(guidances, (slice(above), slice(above, None)), strict=True)
    ]


def _with_first(latents: jax.Array, condition: Condition) -> jax.Array:
    """Latents with the given first frame in the place of theirs."""
    assert condition.first_frame is not None
    return jnp.concatenate([condition.first_frame, latents[:, 1:]], axis=1)
