"""Wan's VAE: frames to latents and back, by diffusers' AutoencoderKLWan."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.encoders.vae import Vae
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple


class WanVae(Vae):
    """The VAE of Wan 2.1 or 2.2; see `Vae`."""

    name = "wan"
    class_name = "AutoencoderKLWan"
    described = "Wan's VAE (AutoencoderKLWan, as diffusers saves it)"
    takes_last_frame = True

    def __init__(self, folder: str | Path, *, device: str | None = None, dtype: str | None = None):
        """See `Vae`.

        Raises:
          InputError: the folder holds no such VAE.
        """
        super().__init__(folder, device=device, dtype=dtype)
        for name in ("latents_mean", "latents_std"):
            count = len(self._config.get(name, [0.0] * 16))
            if count != self.channels:
                raise InputError(
                    f"{self.folder / 'config.json'}: {name} has {count} values, but z_dim is "
                    f"{self.channels}; copy it again"
                )

    @property
    def stride(self) -> Triple:
        """See `Vae.stride`."""
        side = int(self._config.get("scale_factor_spatial", 8))
        return int(self._config.get("scale_factor_temporal", 4)), side, side

    @property
    def channels(self) -> int:
        """See `Vae.channels`."""
        return int(self._config.get("z_dim", 16))

    def encode_given(self, first: np.ndarray, last: np.ndarray | None, frames: int) -> np.ndarray:
        """See `Vae.encode_given`; this is the condition of diffusers' WanImageToVideoPipeline.

        The latents are those of a clip that is mid-grey but for its first and, where it is given,
        last frame. The mask says of which frames each latent was given.

        Args:
          first, last: [H, W, 3] uint8; a last frame needs two frames or more.
          frames: frames of the clip, stride·n + 1.

        Returns:
          [t, h, w, stride + channels] float32: first the mask, 0 or 1 for each of a latent's
          frames, then the normalised latents. All frames of the first latent are given.

        Raises:
          ValueError: a picture has another shape or dtype, or the frames do not fit.
          InputError: as `encode`.
        """
        given = np.stack([first] if last is None else [first, last])
        if frames < len(given):
            raise ValueError(f"frames is {frames}; {len(given)} given pictures need as many")
        self._check_frames(np.broadcast_to(given[:1], (frames, *given.shape[1:])))
        import torch

        pixels = self.pixels(given)
        clip = torch.zeros((1, 3, frames, *pixels.shape[3:]), device=pixels.device)
        clip[:, :, 0] = pixels[:, :, 0]
        if last is not None:
            clip[:, :, -1] = pixels[:, :, -1]
        latents = self.encode_pixels(clip)
        mask = np.zeros((*latents.shape[:3], self.stride[0]), np.float32)
        mask[0] = 1
        if last is not None:
            mask[-1, ..., -1] = 1
        return np.concatenate([mask, latents], axis=-1)

    def _load(self) -> Any:
        from diffusers import AutoencoderKLWan

        return self._read(AutoencoderKLWan)

    def _normalised(self, latents: Any) -> Any:
        mean, inverse_std = self._statistics
        return (latents - mean) * inverse_std

    def _as_decoded(self, latents: Any) -> Any:
        mean, inverse_std = self._statistics
        return latents / inverse_std + mean

    @cached_property
    def _statistics(self) -> tuple[Any, Any]:
        """Mean and inverse standard deviation of the latents, [1, channels, 1, 1, 1] float32."""
        import torch

        config = self._model.config
        mean, std = (
            torch.tensor(values, device=self._device).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return mean, 1.0 / std
