"""What turns prompts and pictures into conditions: encoders, files of embeddings."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.data.manifest import VAE
from alload_jax.data.prepare.captions import clean
from alload_jax.data.prepare.encoders import ByteText
from alload_jax.data.prepare.sources import Bucket, Source, UnusableError, decode_image
from alload_jax.data.record import IMAGE, TEXT, fold_frames
from alload_jax.encoders import open_image, open_text, open_vae
from alload_jax.encoders.conditions import ImageEncoder, TextModel
from alload_jax.encoders.loading import Encoder, release_memory
from alload_jax.encoders.vae import Vae
from alload_jax.errors import InputError, print_stderr
from alload_jax.files import require_regular
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.safetensor_files import open_safetensors


def read_tensors(
    path: Path, names: tuple[str, ...], may_hold_others: bool = False
) -> dict[str, np.ndarray]:
    """Reads the tensors of these names that a file has, as float32.

    A file's only tensor stands for the first name, whatever its own is. Files that many lines of a
    list name are read once.

    Raises:
      InputError: the file or the first tensor is missing, there are others where there may be none,
        or a value is not finite.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):  # reading says what is wrong
        return _read_tensors(path, names, may_hold_others, ())
    version = (found.st_ino, found.st_size, found.st_mtime_ns)
    return _read_tensors(path, names, may_hold_others, version)


@functools.lru_cache(maxsize=16)
def _read_tensors(
    path: Path, names: tuple[str, ...], may_hold_others: bool, version: tuple[int, ...]
) -> dict[str, np.ndarray]:
    first = names[0]
    with open_safetensors(path) as file:
        held = sorted(file.keys())
        if first not in held and len(held) != 1:
            raise InputError(
                f"{path}: holds {', '.join(held) or 'nothing'}; rename one of them to {first}"
            )
        unknown = [name for name in held if name not in names]
        if unknown and len(held) > 1 and not may_hold_others:
            raise InputError(
                f"{path}: holds {', '.join(unknown)}, but the model takes {', '.join(names)} from "
                "it; remove or rename them"
            )
        keys = {first: held[0]} | {name: name for name in names if name in held}
        tensors = {name: file.get_tensor(key) for name, key in keys.items()}
    with np.errstate(over="ignore"):
        found = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    if not all(np.isfinite(values).all() for values in found.values()):
        raise InputError(f"{path}: holds values that are not finite in float32; create it again")
    return found


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
        loaded = [each for each in (self.text, self.image) if isinstance(each, Encoder)]
        for encoder in loaded:
            encoder.unload()
        if loaded:
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
        print_stderr(
            f"note: --image-encoder {image}: the training data had no given frames; what is drawn "
            "from a picture is as good as the run's initial weights are at it"
        )

    def known(origin: object, name: str) -> dict[str, Any]:
        """What an origin says of an encoder; empty if that is nothing, or no mapping."""
        found = origin.get(name) if isinstance(origin, Mapping) else None
        return found if isinstance(found, dict) else {}

    return Encoders(
        _text(model, known(origin, "text"), text),
        None if vae is None else _vae(model, known(origin, VAE), vae),
        None if image is None else _image(model, known(origin.get("image_to_video"), IMAGE), image),
    )


def _text(
    model: ModelConfig, known: dict[str, Any], folder: Path | None
) -> TextModel | ByteText | None:
    if folder is None and (known.get("name") != "bytes" or model.text is None):
        return None
    if folder is None:
        return ByteText(known["width"], known["length"])
    if model.text is None:
        raise InputError(f"--text-encoder {folder}: the model's condition is classes; leave it out")
    if str(folder) == "bytes" and not folder.exists():
        return ByteText(model.text.dim, model.text.length)
    encoder, place = open_text(folder, model.text.length), f"--text-encoder {folder}"
    _require_width(place, encoder.width, model.text.dim)
    _require_same(place, encoder.origin(), known)
    return encoder


def _vae(model: ModelConfig, known: dict[str, Any], folder: Path) -> Vae:
    vae = open_vae(folder)
    if vae.channels != model.latent_channels:
        raise InputError(
            f"--vae {folder}: has latents of {vae.channels} channels, but the model generates "
            f"{model.latent_channels}; name the VAE that the model was trained with"
        )
    _require_same(f"--vae {folder}", vae.origin(), known)
    return vae


def _image(model: ModelConfig, known: dict[str, Any], folder: Path) -> ImageEncoder:
    if model.image is None:
        raise InputError(f"--image-encoder {folder}: the model takes no image embeddings")
    encoder, place = open_image(folder), f"--image-encoder {folder}"
    _require_width(place, encoder.width, model.image.dim)
    _require_same(place, encoder.origin(), known)
    return encoder


def _require_width(place: str, width: int, wanted: int) -> None:
    if width != wanted:
        raise InputError(
            f"{place}: gives embeddings of width {width}, but the model takes {wanted}; "
            "name the encoder that the model was trained with"
        )


def _require_same(place: str, found: Mapping[str, object], known: dict[str, Any]) -> None:
    """Refuses an encoder with another name or other weights than that of the training data.

    Args:
      place: flag and folder, for messages.
      found: origin of the encoder.
      known: origin of the encoder of the training data; empty if it is not known.
    """
    for name in ("name", "weights"):
        if name in known and known[name] != found[name]:
            raise InputError(
                f"{place}: its {name} is {found[name]}, but the training data were prepared with "
                f"{known[name]}; name that encoder's folder"
            )


def read_picture(path: Path, height: int, width: int) -> np.ndarray:
    """Reads an image, turned, resized and cut around its centre to a size, as preparation does.

    Returns:
      [height, width, 3] uint8.

    Raises:
      InputError: the file is missing or no image.
    """
    try:
        source = Source(path, 0, path.stat().st_size)
        require_regular(path)
        (picture,) = decode_image(source, lambda *_: Bucket(height, width))
    except (OSError, UnusableError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: cannot be read as an image ({reason}); name another") from error
    return picture


def as_latent(picture: np.ndarray, channels: int, frames_per_latent: int) -> np.ndarray:
    """A picture as the first latent frame of a model of pixels.

    Args:
      picture: [height, width, 3] uint8.
      channels: of a latent, those of as many pixels as it has frames.
      frames_per_latent: frames of a latent.

    Returns:
      [1, height, width, channels] float32 from −1 to 1.
    """
    values = picture.astype(np.float32) / 127.5 - 1
    if channels == frames_per_latent:
        values = values.mean(axis=-1, keepdims=True)
    return fold_frames(values[None], frames_per_latent)
