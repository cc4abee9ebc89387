"""Encoders with weights: latents of a VAE, embeddings of texts and of first frames."""

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from typing_extensions import override

from alload_jax.data.prepare.encoders import (
    LONGEST_TEXT,
    Encoded,
    EncoderOptions,
    Given,
    GivenEncoder,
    TextEncoder,
    as_float16,
)
from alload_jax.data.prepare.sources import UnusableError
from alload_jax.encoders.conditions import (
    TEXT,
    ClipImage,
    HunyuanVideo13bText,
    HunyuanVideoText,
    ImageEncoder,
    SiglipImage,
    TextModel,
    Umt5Text,
)
from alload_jax.encoders.loading import require_packages
from alload_jax.encoders.vae import HunyuanVideo13bVae, HunyuanVideoVae, Vae, WanVae
from alload_jax.errors import InputError, require_positive_value
from alload_jax.files import Json
from alload_jax.planning.samples import Triple


@cache
def _opened(kind: type[Vae], folder: Path) -> Vae:
    """The VAE of that folder, whose weights then serve its latents and the given frames."""
    return kind(folder)


@dataclass(frozen=True)
class VaeLatents:
    """Stores normalised latents of a VAE as float16; see `VaeEncoder`.

    Attributes:
      patch_size: latents per token of models that train on them.
      vae_class: the class of the VAE.
      vae: the VAE.
      made_from: name, channels and digest of the VAE.
    """

    has_weights: ClassVar[bool] = True
    patch_size: ClassVar[Triple]
    vae_class: ClassVar[type[Vae]]

    vae: Vae
    made_from: Json

    @property
    def stride(self) -> Triple:
        """See `VaeEncoder.stride`."""
        return self.vae.stride

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """See `VaeEncoder.make`."""
        assert options.folder is not None
        vae = _opened(cls.vae_class, options.folder)
        require_packages(f"--vae {cls.vae_class.name}")
        return cls(vae, vae.origin())

    def origin(self) -> Json:
        """See `VaeEncoder.origin`."""
        return dict(self.made_from)

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """See `VaeEncoder.encode`; values that float16 cannot hold become infinite."""
        return as_float16(self.vae.encode(frames))


class WanLatents(VaeLatents):
    """Stores normalised latents of Wan 2.1's or 2.2's VAE as float16; see `VaeEncoder`."""

    patch_size = (1, 2, 2)
    vae_class = WanVae


class HunyuanVideoLatents(VaeLatents):
    """Stores normalised latents of HunyuanVideo 1.5's VAE as float16; see `VaeEncoder`."""

    patch_size = (1, 1, 1)
    vae_class = HunyuanVideoVae


class HunyuanVideo13bLatents(VaeLatents):
    """Stores normalised latents of the VAE of HunyuanVideo's first model; see `VaeEncoder`."""

    patch_size = (1, 2, 2)
    vae_class = HunyuanVideo13bVae


_KINDS = ("first", "first-last")
_NEEDS_NONE = 48  # channels of the VAE of Wan 2.2's 5B model


@dataclass(frozen=True)
class GivenFrames(GivenEncoder):
    """Encodes the given frames of a clip by VAE and image encoder; see `GivenEncoder`.

    Attributes:
      vae_class, image_class: the encoders that its models were trained with.
      needs_image: whether all of its models take embeddings of the image.
      kind: which frames are given.
      vae: the VAE.
      image: the image encoder; None for models that take none.
      made_from: kind, and name and digest of the image encoder.
    """

    vae_class: ClassVar[type[Vae]]
    image_class: ClassVar[type[ImageEncoder]]
    needs_image: ClassVar[bool] = False

    kind: str
    vae: Vae
    image: ImageEncoder | None
    made_from: Json

    @classmethod
    @override
    def make(cls, kind: str, vae_folder: Path, image_folder: Path | None) -> Self:
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
        vae = _opened(cls.vae_class, vae_folder)
        if isinstance(vae, WanVae) and vae.channels == _NEEDS_NONE:
            raise InputError(
                f"--image-to-video {kind}: {vae.folder} is the VAE of Wan 2.2's 5B model, which "
                "takes its first frame from the latents themselves; leave it out and train with "
                "objective.given_first_frame"
            )
        require_packages("--image-to-video")
        image = None if image_folder is None else cls.image_class(image_folder)
        return cls(kind, vae, image, {"given": kind} | ({"image": image.origin()} if image else {}))

    @override
    def origin(self) -> Json:
        return dict(self.made_from)

    @override
    def encode(self, first: np.ndarray, last: np.ndarray, frames: int) -> Given:
        pictures = [first] if self.kind == "first" else [first, last]
        given_last = last if self.kind == "first-last" and frames > 1 else None
        channels = as_float16(self.vae.encode_given(first, given_last, frames))
        if self.image is None:
            return Given(channels, None)
        image = np.concatenate([self.image.encode(picture) for picture in pictures])
        return Given(channels, as_float16(image))


class WanGivenFrames(GivenFrames):
    """Mask and latents of the given frames, and CLIP's embeddings; see `GivenEncoder`."""

    vae_class = WanVae
    image_class = ClipImage


class HunyuanVideoGivenFrames(GivenFrames):
    """Latents of the first frame and its mask, and SigLIP's embeddings; see `GivenEncoder`."""

    vae_class = HunyuanVideoVae
    image_class = SiglipImage
    needs_image = True


@dataclass(frozen=True)
class TextEmbeddings(TextEncoder):
    """Stores embeddings of a text encoder as float16, a row for each token; see `TextEncoder`.

    A file without a caption has the embedding of the empty text.

    Attributes:
      name: value of `--text`.
      text_class: the class of the encoder, made of a folder and the most tokens of a caption.
      needs_torch: whether the encoder runs in PyTorch.
      model: the encoder.
      made_from: name, width, length and digest of the encoder.
    """

    has_weights: ClassVar[bool] = True
    needs_torch: ClassVar[bool] = True
    default_length: ClassVar[int]
    name: ClassVar[str]
    text_class: ClassVar[type[TextModel]]

    model: TextModel
    made_from: Json

    @classmethod
    @override
    def make(cls, options: EncoderOptions) -> Self:
        assert options.folder is not None
        require_positive_value("--text-length", options.text_length, LONGEST_TEXT)
        model = cls.text_class(options.folder, options.text_length)
        if cls.needs_torch:
            require_packages(f"--text {cls.name}")
        return cls(model, model.origin())

    @override
    def origin(self) -> Json:
        return dict(self.made_from)

    @override
    def encode(self, caption: str | None) -> Encoded:
        """[L, width] float16. Equal captions are encoded once."""
        tokens = _encoded(self.model, caption or "")
        if not all(np.isfinite(values).all() for values in tokens.values()):
            raise UnusableError("the text encoder gives values that are not finite")
        return dict(tokens) if len(tokens) > 1 else tokens[TEXT]

    @override
    def surplus_tokens(self, caption: str) -> int:
        return self.model.surplus_tokens(caption)


@lru_cache(128)  # captions; 4 MB each at 512 tokens of width 4096
def _encoded(model: TextModel, caption: str) -> dict[str, np.ndarray]:
    return {name: as_float16(values) for name, values in model.tokens(caption).items()}


class Umt5Embeddings(TextEmbeddings):
    """Stores embeddings of umT5; see `TextEmbeddings`."""

    name = "umt5"
    default_length = 512
    text_class = Umt5Text


class HunyuanVideoEmbeddings(TextEmbeddings):
    """Stores the tokens of the language model, and those of byT5 for quoted words.

    See `TextEmbeddings`. Captions without quotes have no tokens of byT5.
    """

    name = "hunyuan_video"
    default_length = 1000
    text_class = HunyuanVideoText


class HunyuanVideo13bEmbeddings(TextEmbeddings):
    """Stores the tokens of LLaMA and the pooled output of CLIP; see `TextEmbeddings`."""

    name = "hunyuan_video_13b"
    default_length = 256
    text_class = HunyuanVideo13bText
