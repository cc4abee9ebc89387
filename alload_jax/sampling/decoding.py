"""From generated latents to pixels."""

import numpy as np

from alload_jax.data.pixel_latents import unfold_frames
from alload_jax.encoders.vae import Vae
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
