"""What turns frames into latents and captions into conditions, selected by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from alload_jax.planning.geometry import Triple
from alload_jax.registry import Registry

Encoded = np.ndarray | dict[str, np.ndarray]
"""What a `TextEncoder` makes of a caption."""


@dataclass(frozen=True)
class EncoderOptions:
    """What encoders are made from.

    Attributes:
      folder: local folder with the encoder's weights; None for an encoder without.
      text_length: most tokens of a condition.
      captions: captions of all files, cleaned; the same in every process.
    """

    folder: Path | None = None
    text_length: int = 256
    captions: Sequence[str] = ()


class VaeEncoder(Protocol):
    """Turns frames into latents.

    It is pickled and sent to other processes. What is large, such as weights, is loaded by the
    first call of `encode`, not when the encoder is made.

    Attributes:
      has_weights: whether it is made from a folder of weights. Then one process per GPU encodes for
        all workers; otherwise every worker encodes by itself.
    """

    has_weights: ClassVar[bool]

    @property
    def stride(self) -> Triple:
        """Pixels per latent along (frames, height, width)."""
        ...

    @property
    def patch_size(self) -> Triple:
        """Latents per token of models that train on these latents, for the sides of buckets."""
        ...

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """Makes the encoder.

        Raises:
          InputError: the options do not fit it.
        """
        ...

    def origin(self) -> dict[str, Any]:
        """Its name and what else determines the latents (a digest of weights), as JSON values."""
        ...

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """Encodes a clip; equal clips give equal latents.

        Args:
          frames: [T, H, W, 3] uint8; T is 4n + 1.

        Returns:
          [t, h, w, channels] floats, normalised as models train on them.
        """
        ...


class TextEncoder(Protocol):
    """Turns captions into conditions; pickled and loaded like a `VaeEncoder`.

    Attributes:
      has_weights: as `VaeEncoder`'s.
      default_length: most tokens of a condition where none is asked for.
    """

    has_weights: ClassVar[bool]
    default_length: ClassVar[int]

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """Makes the encoder.

        Raises:
          InputError: the options or the captions do not fit it.
        """
        ...

    def origin(self) -> dict[str, Any]:
        """Its name and what else determines the conditions, as JSON values."""
        ...

    def encode(self, caption: str | None) -> Encoded:
        """Encodes a cleaned caption; None for a file without one.

        Returns:
          [L, width] floats, or [L] int32 classes. For models that take several kinds of tokens,
          those kinds by name: `text`, and the others of the models' `condition_parts`.

        Raises:
          UnusableError: a file with this caption, or without one, cannot be used.
        """
        ...


class Given(NamedTuple):
    """What a model is given for a clip.

    Attributes:
      channels: [t, h, w, G] float16, as `Vae.encode_given`.
      image: [L, width] float16, embeddings of the given frames one after the other; None without
        an image encoder.
    """

    channels: np.ndarray
    image: np.ndarray | None


class GivenEncoder(Protocol):
    """Encodes the frames of a clip that are given to a model; pickled like a `VaeEncoder`."""

    @classmethod
    def make(cls, kind: str, vae_folder: Path, image_folder: Path | None) -> Self:
        """Makes the encoder.

        Args:
          kind: value of `--image-to-video`.
          vae_folder: local folder of the VAE, the one that encodes the frames.
          image_folder: local folder of the image encoder; None for none.

        Raises:
          InputError: kind and folders do not fit the models.
        """
        ...

    def origin(self) -> dict[str, Any]:
        """What determines the given arrays beside the VAE, as JSON values."""
        ...

    def encode(self, first: np.ndarray, last: np.ndarray, frames: int) -> Given:
        """Encodes the given frames of a clip.

        Args:
          first, last: [H, W, 3] uint8, its first and last frame.
          frames: number of its frames; of one frame, that frame is given.
        """
        ...


VAE_ENCODERS: Registry[type[Any]] = Registry(
    "--vae",
    {
        "none": "alload_jax.data.prepare.pixels:Pixels",
        "wan": "alload_jax.data.prepare.wan_latents:WanLatents",
        "hunyuan_video": "alload_jax.data.prepare.hunyuan_video_latents:HunyuanVideoLatents",
    },
)
"""Classes of `VaeEncoder`s."""
TEXT_ENCODERS: Registry[type[Any]] = Registry(
    "--text",
    {
        "bytes": "alload_jax.data.prepare.byte_text:ByteText",
        "class": "alload_jax.data.prepare.class_text:ClassText",
        "umt5": "alload_jax.data.prepare.umt5_embeddings:Umt5Embeddings",
        "hunyuan_video": "alload_jax.data.prepare.hunyuan_video_embeddings:HunyuanVideoEmbeddings",
    },
)
"""Classes of `TextEncoder`s."""

GIVEN_ENCODERS: Registry[type[Any]] = Registry(
    "--vae",
    {
        "wan": "alload_jax.data.prepare.wan_latents:WanGivenFrames",
        "hunyuan_video": "alload_jax.data.prepare.hunyuan_video_latents:HunyuanVideoGivenFrames",
    },
)
"""Classes of `GivenEncoder`s by the name of the VAE: its models determine what they are given."""


def sides_multiple(vae: VaeEncoder) -> int:
    """The number that divides the sides of buckets, so that whole tokens cover them."""
    sides = [vae.stride[axis] * vae.patch_size[axis] for axis in (1, 2)]
    return max(16, *sides)
