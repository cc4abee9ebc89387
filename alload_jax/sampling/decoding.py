"""From generated latents to pixels."""

import numpy as np

from alload_jax.data.pixel_latents import unfold_frames
from alload_jax.encoders.vae import Vae
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import family_of
from alload_jax.planning.geometry import Triple
from alload_jax.sampling.requests import Request


def decoded(latents: np.ndarray, request: Request, vae: Vae | None) -> np.ndarray:
    """The picture of a sample: decoded by the VAE, or the pixels that the latents are.

    Args:
      latents: [frames, height, width, channels] of the request's grid.
      request: what was asked for.
      vae: the VAE; None if the latents are pixels.
    """
    if vae is not None:
        return vae.decode(latents)
    return unfold_frames(latents, request.frames_per_latent)


def family_fps(model: ModelConfig, vae_stride: Triple | None) -> float | None:
    """Frames per second of the videos of a model's family.

    Args:
      model: config of the model.
      vae_stride: pixels per latent, (frames, height, width); None if it is not known.

    Returns:
      None if the family names none, or if its latents have another stride.
    """
    defaults = family_of(model).sampling_defaults(model)
    return defaults.fps if vae_stride in (None, defaults.vae_stride) else None
