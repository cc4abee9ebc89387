"""`--vae wan`: latents of Wan's VAE."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from alload_jax.data.prepare.encoders import EncoderOptions
from alload_jax.encoders.devices import require_packages
from alload_jax.encoders.wan_vae import WanVae
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple


@dataclass(frozen=True)
class WanLatents:
    """Stores normalised latents of Wan 2.1's or 2.2's VAE as float16; see `VaeEncoder`.

    Attributes:
      folder: local folder of the VAE.
      stride: pixels per latent along (frames, height, width).
      made_from: name, channels and digest of the VAE.
    """

    has_weights: ClassVar[bool] = True
    patch_size: ClassVar[Triple] = (1, 2, 2)

    folder: Path
    stride: Triple
    made_from: dict[str, Any]

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """See `VaeEncoder.make`."""
        if options.folder is None:
            raise InputError("--vae wan needs the folder of its weights; give --vae-folder DIR")
        vae = wan_vae(options.folder)
        require_packages("--vae wan")
        return cls(options.folder, vae.stride, vae.origin())

    def origin(self) -> dict[str, Any]:
        """See `VaeEncoder.origin`."""
        return dict(self.made_from)

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """See `VaeEncoder.encode`; values that float16 cannot hold become infinite."""
        return as_float16(wan_vae(self.folder).encode(frames))


def as_float16(values: np.ndarray) -> np.ndarray:
    """Rounds to float16, without a warning about what is too large for it."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


@cache
def wan_vae(folder: Path) -> WanVae:
    """The VAE of that folder in this process; its weights stay once they are loaded."""
    return WanVae(folder)
