"""From a sample's frames, height and width to its latents and its sequence length."""

from dataclasses import dataclass

import numpy as np

from alload_jax.errors import InputError

Triple = tuple[int, int, int]
PIXEL_PATCH: Triple = (1, 16, 16)
"""The patch size with which tokens of pixels are counted where no model is named."""


@dataclass(frozen=True)
class Geometry:
    """How pixels become tokens. The defaults are Wan 2.1's.

    Attributes:
      vae_stride: pixels per latent along (frames, height, width); 1, 1, 1 without a VAE. The
        first frame has a latent of its own: frames F give (F − 1) / stride + 1.
      patch_size: latents per token along (frames, height, width).
    """

    vae_stride: Triple = (4, 8, 8)
    patch_size: Triple = (1, 2, 2)

    def __post_init__(self) -> None:
        for name in ("vae_stride", "patch_size"):
            value = getattr(self, name)
            if len(value) != 3 or min(value) < 1:
                raise InputError(f"{name} is {value}; it must be three whole numbers of at least 1")

    def latent_grid(self, frames: np.ndarray, height: np.ndarray, width: np.ndarray) -> np.ndarray:
        """Latent (frames, height, width) of each sample; sizes that don't divide are rounded up.

        Args:
          frames, height, width: [N] integers, in pixels.

        Returns:
          [N, 3] int64.
        """
        stride_t, stride_h, stride_w = self.vae_stride
        return np.stack(
            [
                _ceil_div(np.asarray(frames, np.int64) - 1, stride_t) + 1,
                _ceil_div(np.asarray(height, np.int64), stride_h),
                _ceil_div(np.asarray(width, np.int64), stride_w),
            ],
            axis=-1,
        )

    def seq_len(self, frames: np.ndarray, height: np.ndarray, width: np.ndarray) -> np.ndarray:
        """Tokens of each sample.

        Args:
          frames, height, width: [N] integers, in pixels.

        Returns:
          [N] int64.
        """
        return self.token_grid(frames, height, width).prod(axis=-1)

    def token_grid(self, frames: np.ndarray, height: np.ndarray, width: np.ndarray) -> np.ndarray:
        """Tokens along (frames, height, width) of each sample; arguments as `latent_grid`'s.

        Returns:
          [N, 3] int64.
        """
        return _ceil_div(self.latent_grid(frames, height, width), np.asarray(self.patch_size))


def divisible(size: Triple, vae_stride: Triple, patch_size: Triple) -> bool:
    """Whether a sample of this size in pixels is made of whole latents and whole patches."""
    parts = zip((size[0] - 1, *size[1:]), vae_stride, strict=True)
    if any(part % stride for part, stride in parts):
        return False
    grid = Geometry(vae_stride).latent_grid(*np.asarray(size)[:, None])[0]
    return not (grid % np.asarray(patch_size)).any()


def _ceil_div(value: np.ndarray, divisor: int | np.ndarray) -> np.ndarray:
    return -(-value // divisor)
