"""The encoders of `alload sample`: words and pictures in, pictures out."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.data.manifest import VAE
from alload_jax.data.prepare.byte_text import ByteText
from alload_jax.data.prepare.captions import clean
from alload_jax.data.record import TEXT
from alload_jax.encoders.devices import release_memory
from alload_jax.encoders.image import ImageEncoder
from alload_jax.encoders.known import open_image, open_text, open_vae
from alload_jax.encoders.text_model import TextModel
from alload_jax.encoders.vae import Vae
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig


@dataclass(frozen=True)
class Encoders:
    """The encoders that there are; weights are loaded when they are first used.

    Attributes:
      text: encoder of prompts.
      vae: encoder of given frames and decoder of samples.
      image: encoder of given images.
    """

    text: TextModel | ByteText | None = None
    vae: Vae | None = None
    image: ImageEncoder | None = None

    def encoded(self, words: str) -> dict[str, np.ndarray]:
        """The tokens of a prompt by kind, [L, width] float32: `text`, and others if it has some.

        Raises:
          InputError: the weights of the encoder cannot be loaded.
        """
        assert self.text is not None
        if isinstance(self.text, ByteText):
            return {TEXT: self.text.encode(clean(words)).astype(np.float32)}
        return self.text.tokens(words)

    def unload(self) -> None:
        """Frees the weights of text and image encoders, which are as large as the model's."""
        for encoder in (self.text, self.image):
            if encoder is not None and not isinstance(encoder, ByteText):
                encoder.unload()
        release_memory()


def find_encoders(
    model: ModelConfig,
    origin: Mapping[str, Any],
    *,
    text: Path | None = None,
    vae: Path | None = None,
    image: Path | None = None,
) -> Encoders:
    """Finds the encoders in local folders and checks that they are those of the training data.

    Data that were prepared with `--text bytes` need no folder for prompts.

    Args:
      model: config of the model.
      origin: origin of the training data; empty if it is not known.
      text, vae, image: folders of text encoder, VAE and image encoder; None where there is none.

    Raises:
      InputError: a folder holds no such encoder, or one that does not fit model or data.
    """
    if image is not None and origin and "image_to_video" not in origin:
        print(
            f"note: --image-encoder {image}: the training data had no given frames; what is drawn "
            "from a picture is as good as the run's initial weights are at it",
            file=sys.stderr,
        )
    return Encoders(
        _text(model, origin.get("text"), text),
        None if vae is None else _vae(model, origin.get(VAE), vae),
        None if image is None else _image(model, origin.get("image_to_video"), image),
    )


def _text(model: ModelConfig, known: Any, folder: Path | None) -> TextModel | ByteText | None:
    known = known if isinstance(known, dict) else {}
    if folder is None:
        if known.get("name") != "bytes" or model.text is None:
            return None
        return ByteText(known["width"], known["length"])
    if str(folder) == "bytes" and not folder.exists():
        if model.text is None:
            raise InputError("--text-encoder bytes: the model's condition is classes; leave it out")
        return ByteText(model.text.dim, model.text.length)
    if model.text is None:
        raise InputError(f"--text-encoder {folder}: the model's condition is classes; leave it out")
    encoder = open_text(folder, model.text.length)
    if encoder.width != model.text.dim:
        raise InputError(
            f"--text-encoder {folder}: gives embeddings of width {encoder.width}, but the model "
            f"takes {model.text.dim}; name the encoder that the model was trained with"
        )
    _require_same("--text-encoder", folder, encoder.origin(), known)
    return encoder


def _vae(model: ModelConfig, known: Any, folder: Path) -> Vae:
    vae = open_vae(folder)
    if vae.channels != model.latent_channels:
        raise InputError(
            f"--vae {folder}: has latents of {vae.channels} channels, but the model generates "
            f"{model.latent_channels}; name the VAE that the model was trained with"
        )
    _require_same("--vae", folder, vae.origin(), known if isinstance(known, dict) else {})
    return vae


def _image(model: ModelConfig, known: Any, folder: Path) -> ImageEncoder:
    if model.image is None:
        raise InputError(f"--image-encoder {folder}: the model takes no image embeddings")
    encoder = open_image(folder)
    if encoder.width != model.image.dim:
        raise InputError(
            f"--image-encoder {folder}: gives embeddings of width {encoder.width}, but the model "
            f"takes {model.image.dim}; name the encoder that the model was trained with"
        )
    if isinstance(known, dict) and isinstance(known.get("image"), dict):
        _require_same("--image-encoder", folder, encoder.origin(), known["image"])
    return encoder


def _require_same(
    flag: str, folder: Path, found: Mapping[str, Any], known: Mapping[str, Any]
) -> None:
    """Refuses an encoder with other weights than that of the training data."""
    for name in ("name", "weights"):
        if name in known and known[name] != found[name]:
            raise InputError(
                f"{flag} {folder}: its {name} is {found[name]}, but the training data were "
                f"prepared with {known[name]}; name that encoder's folder"
            )
