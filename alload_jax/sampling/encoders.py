"""The encoders of `alload sample`: words and pictures in, pictures out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.data.manifest import VAE
from alload_jax.data.prepare.byte_text import ByteText
from alload_jax.data.prepare.captions import clean
from alload_jax.encoders.clip_image import ClipImage
from alload_jax.encoders.devices import release_memory
from alload_jax.encoders.umt5 import Umt5Text
from alload_jax.encoders.wan_vae import WanVae
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

    text: Umt5Text | ByteText | None = None
    vae: WanVae | None = None
    image: ClipImage | None = None

    def encoded(self, words: str) -> np.ndarray:
        """The embeddings of a prompt, [L, width] float32.

        Raises:
          InputError: the weights of the encoder cannot be loaded.
        """
        assert self.text is not None
        if isinstance(self.text, ByteText):
            return self.text.encode(clean(words)).astype(np.float32)
        (found,) = self.text.encode([words])
        return found

    def unload(self) -> None:
        """Frees the weights of text and image encoders, which are as large as the model's."""
        for encoder in (self.text, self.image):
            if isinstance(encoder, Umt5Text | ClipImage):
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
      text, vae, image: folders of umT5, of Wan's VAE and of CLIP; None where there is none.

    Raises:
      InputError: a folder holds no such encoder, or one that does not fit model or data.
    """
    return Encoders(
        _text(model, origin.get("text"), text),
        None if vae is None else _vae(model, origin.get(VAE), vae),
        None if image is None else _image(model, image),
    )


def _text(model: ModelConfig, known: Any, folder: Path | None) -> Umt5Text | ByteText | None:
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
    encoder = Umt5Text(folder, model.text.length)
    if encoder.width != model.text.dim:
        raise InputError(
            f"--text-encoder {folder}: gives embeddings of width {encoder.width}, but the model "
            f"takes {model.text.dim}; name the encoder that the model was trained with"
        )
    _require_same("--text-encoder", folder, encoder.origin(), known)
    return encoder


def _vae(model: ModelConfig, known: Any, folder: Path) -> WanVae:
    vae = WanVae(folder)
    if vae.channels != model.latent_channels:
        raise InputError(
            f"--vae {folder}: has latents of {vae.channels} channels, but the model generates "
            f"{model.latent_channels}; name the VAE that the model was trained with"
        )
    _require_same("--vae", folder, vae.origin(), known if isinstance(known, dict) else {})
    return vae


def _image(model: ModelConfig, folder: Path) -> ClipImage:
    if model.image is None:
        raise InputError(f"--image-encoder {folder}: the model takes no image embeddings")
    return ClipImage(folder)


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
