"""`--image-to-video`: what image-to-video models are given, stored beside the latents."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np

from alload_jax.data.prepare.wan_latents import as_float16, wan_vae
from alload_jax.encoders.clip_image import ClipImage
from alload_jax.encoders.devices import require_packages
from alload_jax.errors import InputError

GivenKind = Literal["first", "first-last"]
_NEEDS_NONE = 48  # channels of the VAE of Wan 2.2's 5B model


class Given(NamedTuple):
    """What a model is given for a clip.

    Attributes:
      channels: [t, h, w, G] float16, as `WanVae.encode_given`.
      image: [L, width] float16, embeddings of the given frames one after the other; None without
        an image encoder.
    """

    channels: np.ndarray
    image: np.ndarray | None


@dataclass(frozen=True)
class GivenFrames:
    """Encodes the frames of a clip that are given to a model; pickled like a `VaeEncoder`.

    Attributes:
      kind: which frames are given.
      vae_folder: local folder of Wan's VAE.
      image_folder: local folder of CLIP's image encoder; None for models that take none.
      made_from: kind, and name and digest of the image encoder.
    """

    kind: GivenKind
    vae_folder: Path
    image_folder: Path | None
    made_from: dict[str, Any]

    @classmethod
    def make(cls, kind: str, vae: str, vae_folder: Path | None, image_folder: Path | None) -> Self:
        """Makes the encoder.

        Args:
          kind: value of `--image-to-video`.
          vae: name of the encoder of frames.
          vae_folder, image_folder: local folders.

        Raises:
          InputError: kind, VAE and folders do not fit each other.
        """
        if kind not in get_args(GivenKind):
            raise InputError(f"--image-to-video is {kind}; choose first or first-last")
        if vae != "wan" or vae_folder is None:
            raise InputError(f"--image-to-video {kind} needs latents of Wan's VAE; give --vae wan")
        if wan_vae(vae_folder).channels == _NEEDS_NONE:
            raise InputError(
                f"--image-to-video {kind}: {vae_folder} is the VAE of Wan 2.2's 5B model, which "
                "takes its first frame from the latents themselves; leave it out and train with "
                "objective.given_first_frame"
            )
        require_packages("--image-to-video")
        origin: dict[str, Any] = {"given": kind}
        if image_folder is not None:
            origin["image"] = _clip(image_folder).origin()
        return cls("first" if kind == "first" else "first-last", vae_folder, image_folder, origin)

    def origin(self) -> dict[str, Any]:
        """What determines the given arrays beside the VAE, as JSON values."""
        return dict(self.made_from)

    def encode(self, first: np.ndarray, last: np.ndarray, frames: int) -> Given:
        """Encodes the given frames of a clip.

        Args:
          first, last: [H, W, 3] uint8, its first and last frame.
          frames: number of its frames; of one frame, that frame is given.
        """
        pictures = [first] if self.kind == "first" else [first, last]
        given_last = last if self.kind == "first-last" and frames > 1 else None
        channels = wan_vae(self.vae_folder).encode_given(first, given_last, frames)
        if self.image_folder is None:
            return Given(as_float16(channels), None)
        clip = _clip(self.image_folder)
        image = np.concatenate([clip.encode(picture) for picture in pictures])
        return Given(as_float16(channels), as_float16(image))


@cache
def _clip(folder: Path) -> ClipImage:
    """The image encoder of this process, with its weights once they are loaded."""
    return ClipImage(folder)
