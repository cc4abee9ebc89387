"""HunyuanVideo 1.5's VAE, by diffusers' AutoencoderKLHunyuanVideo15."""

from typing import Any

import numpy as np

from alload_jax.encoders.causal_chunks import CausalChunks
from alload_jax.encoders.vae import Vae
from alload_jax.planning.geometry import Triple


class HunyuanVideoVae(Vae):
    """The VAE of HunyuanVideo 1.5; see `Vae`. Long clips are taken a few frames at a time."""

    name = "hunyuan_video"
    class_name = "AutoencoderKLHunyuanVideo15"
    described = "HunyuanVideo 1.5's VAE (AutoencoderKLHunyuanVideo15, as diffusers saves it)"
    takes_last_frame = False

    @property
    def stride(self) -> Triple:
        """See `Vae.stride`."""
        side = int(self._config.get("spatial_compression_ratio", 16))
        return int(self._config.get("temporal_compression_ratio", 4)), side, side

    @property
    def channels(self) -> int:
        """See `Vae.channels`."""
        return int(self._config.get("latent_channels", 32))

    def encode_given(self, first: np.ndarray, last: np.ndarray | None, frames: int) -> np.ndarray:
        """See `Vae.encode_given`; as diffusers' HunyuanVideo15ImageToVideoPipeline makes it.

        Args:
          first: [H, W, 3] uint8.
          last: None, because the models take no last frame.
          frames: frames of the clip, stride·n + 1.

        Returns:
          [t, h, w, channels + 1] float32: the normalised latents of the first frame, zeros behind
          them, and a mask that is 1 for the first frame.

        Raises:
          ValueError: as `Vae.encode_given`, or a last frame is given.
          InputError: as `encode`.
        """
        if last is not None:
            raise ValueError("last is given, but the models take a first frame only; give None")
        self._check_frames(np.broadcast_to(first[None], (frames, *first.shape)))
        latents = self.encode(first[None])
        given = np.zeros(
            ((frames - 1) // self.stride[0] + 1, *latents.shape[1:3], self.channels + 1), np.float32
        )
        given[:1, ..., :-1] = latents
        given[:1, ..., -1] = 1
        return given

    def _load(self) -> Any:
        from diffusers import AutoencoderKLHunyuanVideo15

        model = self._read(AutoencoderKLHunyuanVideo15)
        frames, height, width = self.stride
        CausalChunks(model.encoder, frames, 1)
        CausalChunks(model.decoder, 1, frames * height * width)
        return model

    def _normalised(self, latents: Any) -> Any:
        return latents * self._model.config.scaling_factor

    def _as_decoded(self, latents: Any) -> Any:
        return latents / self._model.config.scaling_factor
