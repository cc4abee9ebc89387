"""Latents without a VAE: pixels, of one frame or of several.

With n frames to a latent, the first frame has one of its own, n times over, and each of the others
holds the next n frames in its channels: time as in the causal VAEs of video models.
"""

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.planning.samples import Triple


def pixel_channels(vae_stride: Triple, channels: int) -> int | None:
    """Channels of the pixels that latents hold.

    Args:
      vae_stride: pixels per latent, (frames, height, width).
      channels: of a latent.

    Returns:
      1 (grey) or 3 (colour); None if the latents are a VAE's.
    """
    frames, *sides = vae_stride
    found, rest = divmod(channels, frames)
    return found if sides == [1, 1] and rest == 0 and found in (1, 3) else None


def holds_pixels(manifest: Manifest) -> bool:
    """Whether samples are grey or colour pictures, not latents of a VAE."""
    return pixel_channels(manifest.vae_stride, int(manifest.channels[0])) is not None


def fold_frames(frames: np.ndarray, per_latent: int) -> np.ndarray:
    """[per_latent · n + 1, H, W, C] pixels → [n + 1, H, W, per_latent · C] latents."""
    padded = np.concatenate([np.repeat(frames[:1], per_latent - 1, axis=0), frames])
    groups = padded.reshape(-1, per_latent, *frames.shape[1:])
    return np.moveaxis(groups, 1, -2).reshape(len(groups), *frames.shape[1:3], -1)


def unfold_frames(latents: np.ndarray, per_latent: int) -> np.ndarray:
    """[..., n + 1, H, W, per_latent · C] latents → [..., per_latent · n + 1, H, W, C] pixels.

    The first frame is the mean of its copies, which differ in what a model generates.
    """
    *others, groups, height, width, channels = latents.shape
    shape = (*others, groups, height, width, per_latent, channels // per_latent)
    frames = np.moveaxis(latents.reshape(shape), -2, -4)
    first = frames[..., :1, :, :, :, :].mean(axis=-4)
    later = frames[..., 1:, :, :, :, :]
    later = later.reshape(*others, (groups - 1) * per_latent, *later.shape[-3:])
    return np.concatenate([first, later], axis=-4)
