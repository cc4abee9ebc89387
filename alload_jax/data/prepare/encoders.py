"""Encoders by name: of frames to latents, of captions to conditions, and of given frames."""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
from typing_extensions import override

from alload_jax.data.prepare.sources import UnusableError
from alload_jax.data.record import fold_frames, unit_interval
from alload_jax.encoders import conditions
from alload_jax.encoders.loading import (
    LONGEST_TEXT,
    EncoderOptions,
    TextEncoder,
    VaeEncoder,
    as_float16,
    require_packages,
)
from alload_jax.encoders.vae import HunyuanVideoVae, Vae, WanVae, opened
from alload_jax.errors import InputError, require_positive_value
from alload_jax.files import Json
from alload_jax.planning.samples import PIXEL_PATCH, Triple
from alload_jax.registry import Registry


class Given(NamedTuple):
    """What a model is given for a clip.

    Attributes:
      channels: [t, h, w, G] float16, as `Vae.encode_given`; None without given frames.
      image: [L, width] float16, embeddings of the given frames one after the other; None without
        an image encoder.
    """

    channels: np.ndarray | None
    image: np.ndarray | None


GIVEN_ENCODERS: Registry[type["GivenFrames"]] = Registry(
    "--vae",
    {
        "wan": "alload_jax.data.prepare.encoders:WanGivenFrames",
        "hunyuan_video": "alload_jax.data.prepare.encoders:HunyuanVideoGivenFrames",
    },
)
"""Classes of `GivenFrames` by the name of the VAE: its models determine what they are given."""


@dataclass(frozen=True)
class Pixels(VaeEncoder):
    """Stores pixels as float16 from −1 (black) to 1 (white); see `VaeEncoder`.

    Attributes:
      frames_per_latent: frames in the channels of a latent (`fold_frames`).
    """

    patch_size: ClassVar[Triple] = PIXEL_PATCH

    frames_per_latent: int = 1

    @property
    @override
    def stride(self) -> Triple:
        return (self.frames_per_latent, 1, 1)

    @classmethod
    @override
    def make(cls, options: EncoderOptions) -> Self:
        return cls(options.frames_per_latent)

    @override
    def origin(self) -> Json:
        return {"name": "none"}

    @override
    def encode(self, frames: np.ndarray) -> np.ndarray:
        levels = (np.arange(256) / 127.5 - 1).astype(np.float16)
        return fold_frames(levels[frames], self.frames_per_latent)


@dataclass(frozen=True)
class ByteText(TextEncoder):
    """Gives each UTF-8 byte of a caption a row: its own vector plus that of its place.

    Both vectors are fixed and random: component j of vector v is number v·width + j of the
    SplitMix64 sequence (Steele, Lea and Flood, 2014) from the seed 0 (bytes) or 1 (places), taken
    as uniform with unit variance. The rows have unit variance too. Nothing depends on a library's
    random generator, so that the same caption has the same embedding everywhere.

    Attributes:
      width: components of a row.
      length: most bytes of a caption; the rest is cut off between characters.
    """

    default_length: ClassVar[int] = 256

    width: int = 64
    length: int = 256

    @classmethod
    @override
    def make(cls, options: EncoderOptions) -> Self:
        require_positive_value("--text-length", options.text_length, LONGEST_TEXT)
        return cls(length=options.text_length)

    @override
    def origin(self) -> Json:
        return {"name": "bytes", "width": self.width, "length": self.length, "version": 1}

    @override
    def encode(self, caption: str | None) -> np.ndarray:
        """[L, width] float16, L = 0 without a caption."""
        data = (caption or "").encode("utf-8", "replace")[: self.length]
        data = data.decode("utf-8", "ignore").encode()  # without half a character at the end
        values = np.frombuffer(data, np.uint8)
        places = uniform_vectors(1, self.length, self.width)[: len(values)]
        rows = uniform_vectors(0, 256, self.width)[values] + places
        return (rows / np.sqrt(2.0)).astype(np.float16)

    @override
    def surplus_tokens(self, caption: str) -> int:
        return max(0, len(caption.encode("utf-8", "replace")) - self.length)


@cache
def uniform_vectors(seed: int, count: int, width: int) -> np.ndarray:
    """[count, width] float64 from −√3 to √3: the first outputs of SplitMix64 from a seed."""
    number = np.arange(1, count * width + 1, dtype=np.uint64)
    unit = unit_interval(number * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed))
    return ((2 * unit - 1) * np.sqrt(3.0)).reshape(count, width)


_MOST_CLASSES = 10_000


@dataclass(frozen=True)
class ClassText(TextEncoder):
    """Gives each distinct caption a class number; see `TextEncoder`.

    Attributes:
      classes: names of the classes, by number. Captions that are all whole numbers are the class
        numbers themselves; other captions are numbered in sorted order.
    """

    default_length: ClassVar[int] = 256

    classes: tuple[str, ...]

    @classmethod
    @override
    def make(cls, options: EncoderOptions) -> Self:
        names = sorted({caption for caption in options.captions if caption})
        if not names:
            raise InputError("--text class: no file has a caption; choose --text bytes")
        numbers = all(name.isascii() and name.isdecimal() and len(name) < 8 for name in names)
        count = max(map(int, names)) + 1 if numbers else len(names)
        if count > _MOST_CLASSES:
            raise InputError(
                f"--text class: the captions are {count:,} classes, more than {_MOST_CLASSES:,}; "
                "choose --text bytes, or name the column of classes with --caption-column"
            )
        return cls(tuple(str(number) for number in range(count)) if numbers else tuple(names))

    @override
    def origin(self) -> Json:
        return {"name": "class", "classes": list(self.classes)}

    @override
    def encode(self, caption: str | None) -> np.ndarray:
        """[1] int32."""
        if not caption:
            raise UnusableError("no caption, which --text class needs")
        name = str(int(caption)) if caption.isascii() and caption.isdecimal() else caption
        number = self._numbers.get(caption, self._numbers.get(name))
        if number is None:
            raise UnusableError(f"caption {caption[:40]!r} is no class")
        return np.array([number], np.int32)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}


# ---------------------------------------------------------------- given frames


_KINDS = ("first", "first-last")
_NEEDS_NONE = 48  # channels of the VAE of Wan 2.2's 5B model


@dataclass(frozen=True)
class GivenFrames:
    """Encodes the frames of a clip that are given to a model; pickled like a `VaeEncoder`.

    Attributes:
      vae_class, image_class: the encoders that its models were trained with.
      needs_image: whether all of its models take embeddings of the image.
      kind: which frames are given.
      vae: the VAE.
      image: the image encoder; None for models that take none.
    """

    vae_class: ClassVar[type[Vae]]
    image_class: ClassVar[type[conditions.ImageEncoder]]
    needs_image: ClassVar[bool] = False

    kind: str
    vae: Vae
    image: conditions.ImageEncoder | None

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
        vae = opened(cls.vae_class, vae_folder)
        if isinstance(vae, WanVae) and vae.channels == _NEEDS_NONE:
            raise InputError(
                f"--image-to-video {kind}: {vae.folder} is the VAE of Wan 2.2's 5B model, which "
                "takes its first frame from the latents themselves; leave it out and train with "
                "objective.given_first_frame"
            )
        require_packages("--image-to-video")
        image = None if image_folder is None else cls.image_class(image_folder)
        return cls(kind, vae, image)

    def origin(self) -> Json:
        """What determines the given arrays beside the VAE, as JSON values."""
        return {"given": self.kind} | ({"image": self.image.origin()} if self.image else {})

    def encode(self, first: np.ndarray, last: np.ndarray, frames: int) -> Given:
        """Encodes the given frames of a clip.

        Args:
          first, last: [H, W, 3] uint8, its first and last frame.
          frames: number of its frames; of one frame, that frame is given.
        """
        pictures = [first] if self.kind == "first" else [first, last]
        given_last = last if self.kind == "first-last" and frames > 1 else None
        channels = as_float16(self.vae.encode_given(first, given_last, frames))
        if self.image is None:
            return Given(channels, None)
        image = np.concatenate([self.image.encode(picture) for picture in pictures])
        return Given(channels, as_float16(image))


class WanGivenFrames(GivenFrames):
    """Mask and latents of the given frames, and CLIP's embeddings; see `GivenFrames`."""

    vae_class = WanVae
    image_class = conditions.ClipImage


class HunyuanVideoGivenFrames(GivenFrames):
    """Latents of the first frame and its mask, and SigLIP's embeddings; see `GivenFrames`."""

    vae_class = HunyuanVideoVae
    image_class = conditions.SiglipImage
    needs_image = True
