"""What the encoders of frames with weights have in common: latents of a VAE of diffusers."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from alload_jax.data.prepare.encoders import EncoderOptions
from alload_jax.data.prepare.rounding import as_float16
from alload_jax.encoders.devices import require_packages
from alload_jax.encoders.vae import Vae
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple


@dataclass(frozen=True)
class VaeLatents:
    """Stores normalised latents of a VAE as float16; see `VaeEncoder`.

    Attributes:
      patch_size: latents per token of models that train on them.
      vae_class: the VAE.
      folder: local folder of the VAE.
      stride: pixels per latent along (frames, height, width).
      made_from: name, channels and digest of the VAE.
    """

    has_weights: ClassVar[bool] = True
    patch_size: ClassVar[Triple]
    vae_class: ClassVar[type[Vae]]

    folder: Path
    stride: Triple
    made_from: dict[str, Any]

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """See `VaeEncoder.make`."""
        flag = f"--vae {cls.vae_class.name}"
        if options.folder is None:
            raise InputError(f"{flag} needs the folder of its weights; give --vae-folder DIR")
        vae = vae_in(cls.vae_class, options.folder)
        require_packages(flag)
        return cls(options.folder, vae.stride, vae.origin())

    def origin(self) -> dict[str, Any]:
        """See `VaeEncoder.origin`."""
        return dict(self.made_from)

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """See `VaeEncoder.encode`; values that float16 cannot hold become infinite."""
        return as_float16(vae_in(self.vae_class, self.folder).encode(frames))


@cache
def vae_in(kind: type[Vae], folder: Path) -> Vae:
    """The VAE of that folder in this process; its weights stay once they are loaded."""
    return kind(folder)
