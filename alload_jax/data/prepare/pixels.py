"""`--vae none`: pixels instead of latents."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from alload_jax.data.prepare.encoders import EncoderOptions
from alload_jax.planning.geometry import PIXEL_PATCH, Triple


@dataclass(frozen=True)
class Pixels:
    """Stores pixels as float16 from −1 (black) to 1 (white); see `VaeEncoder`."""

    has_weights: ClassVar[bool] = False
    stride: Triple = (1, 1, 1)
    patch_size: Triple = PIXEL_PATCH

    @classmethod
    def make(cls, _: EncoderOptions) -> Self:
        """See `VaeEncoder.make`."""
        return cls()

    def origin(self) -> dict[str, Any]:
        """See `VaeEncoder.origin`."""
        return {"name": "none"}

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """See `VaeEncoder.encode`."""
        levels = (np.arange(256) / 127.5 - 1).astype(np.float16)
        return levels[frames]
