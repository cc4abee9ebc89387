"""`--image-to-video`: what image-to-video models are given, stored beside the latents."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from alload_jax.data.prepare.encoders import Given
from alload_jax.data.prepare.rounding import as_float16
from alload_jax.data.prepare.vae_latents import vae_in
from alload_jax.encoders.devices import require_packages
from alload_jax.encoders.image import ImageEncoder
from alload_jax.encoders.vae import Vae
from alload_jax.errors import InputError

_KINDS = ("first", "first-last")


@dataclass(frozen=True)
class GivenFrames:
    """Encodes the given frames of a clip by VAE and image encoder; see `GivenEncoder`.

    Attributes:
      vae_class, image_class: the encoders that its models were trained with.
      needs_image: whether all of its models take embeddings of the image.
      kind: which frames are given.
      vae_folder: local folder of the VAE.
      image_folder: local folder of the image encoder; None for models that take none.
      made_from: kind, and name and digest of the image encoder.
    """

    vae_class: ClassVar[type[Vae]]
    image_class: ClassVar[type[ImageEncoder]]
    needs_image: ClassVar[bool] = False

    kind: str
    vae_folder: Path
    image_folder: Path | None
    made_from: dict[str, Any]

    @classmethod
    def make(cls, kind: str, vae_folder: Path, image_folder: Path | None) -> Self:
        """See `GivenEncoder.make`."""
        if kind not in _KINDS:
            raise InputError(f"--image-to-video is {kind}; choose {' or '.join(_KINDS)}")
        if kind == "first-last" and not cls.vae_class.takes_last_frame:
            raise InputError(
                f"--image-to-video is {kind}, but models on latents of --vae {cls.vae_class.name} "
                "take a first frame only; choose first"
            )
        if cls.needs_image and image_folder is None:
            raise InputError(
                f"--image-to-video {kind}: models on latents of --vae {cls.vae_class.name} take "
                "embeddings of the image too; give --image-folder DIR"
            )
        cls.check_vae(kind, vae_in(cls.vae_class, vae_folder))
        require_packages("--image-to-video")
        origin: dict[str, Any] = {"given": kind}
        if image_folder is not None:
            origin["image"] = _image_in(cls.image_class, image_folder).origin()
        return cls(kind, vae_folder, image_folder, origin)

    @classmethod
    def check_vae(cls, kind: str, vae: Vae) -> None:
        """Checks that models on latents of this VAE are given frames.

        Raises:
          InputError: they are not.
        """

    def origin(self) -> dict[str, Any]:
        """See `GivenEncoder.origin`."""
        return dict(self.made_from)

    def encode(self, first: np.ndarray, last: np.ndarray, frames: int) -> Given:
        """See `GivenEncoder.encode`."""
        pictures = [first] if self.kind == "first" else [first, last]
        given_last = last if self.kind == "first-last" and frames > 1 else None
        vae = vae_in(self.vae_class, self.vae_folder)
        channels = as_float16(vae.encode_given(first, given_last, frames))
        if self.image_folder is None:
            return Given(channels, None)
        encoder = _image_in(self.image_class, self.image_folder)
        image = np.concatenate([encoder.encode(picture) for picture in pictures])
        return Given(channels, as_float16(image))


@cache
def _image_in(kind: type[ImageEncoder], folder: Path) -> ImageEncoder:
    """The image encoder of this process, with its weights once they are loaded."""
    return kind(folder)
