"""Requests of `alload sample`, from flags or from a list."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from alload_jax.data.pixel_latents import pixel_channels
from alload_jax.errors import InputError
from alload_jax.files import parse_json, read_text
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.geometry import Triple
from alload_jax.sampling.encoders import Encoders

NUMBERS = ("frames", "height", "width", "seed")
FILES = ("prompt_embeds", "negative_embeds", "image_embeds", "image", "last_image", "out")
WORDS = ("prompt", "negative_prompt")
KEYS = ("class", *NUMBERS, *WORDS, *FILES)
"""The keys of a request; the flags have the same names."""


class Target(NamedTuple):
    """The model and settings that requests must fit.

    Attributes:
      model: config of the model.
      vae_stride: pixels per latent, (frames, height, width).
      text_length: number of classes per sample; None for the number in the request.
      zoom: scale factor of pictures.
      encoders: the encoders that there are.
      trained_null: whether guidance without a negative prompt leads away from zeros, on which the
        model was trained; else from the embeddings of an empty text, where there is an encoder.
    """

    model: ModelConfig
    vae_stride: Triple
    text_length: int | None
    zoom: int
    encoders: Encoders = Encoders()
    trained_null: bool = True

    @property
    def picture_channels(self) -> int | None:
        """Number of channels, 1 or 3, if samples are pictures; None if they stay latents."""
        if self.encoders.vae is not None:
            return 3
        return pixel_channels(self.vae_stride, self.model.latent_channels)

    @property
    def frames_per_latent(self) -> int:
        """Number of frames of a latent that holds pixels; 1 for other latents."""
        pixels = self.encoders.vae is None and self.picture_channels is not None
        return self.vae_stride[0] if pixels else 1


@dataclass(frozen=True)
class RawRequest:
    """Values that a user gave, by the names in `KEYS`.

    Attributes:
      values: the given values; classes as a tuple, files as paths.
      line: place of the request in a list, such as `items.jsonl: line 3`; empty for flags.
      in_line: names of the values that the line contains.
    """

    values: Mapping[str, Any]
    line: str = ""
    in_line: frozenset[str] = frozenset()

    def place(self, key: str) -> str:
        """Returns the place of a value for messages."""
        if self.line and (key in self.in_line or key not in self.values):
            return f"{self.line}: {key}"
        return f"alload sample: --{key.replace('_', '-')}"

    def get(self, key: str) -> Any:
        """Returns a required value.

        Raises:
          InputError: the value is not given.
        """
        if key not in self.values:
            remedy = f", or --{key} for all lines" if self.line else ""
            raise InputError(f"{self.place(key)} is not given; give it{remedy}")
        return self.values[key]


class Request(NamedTuple):
    """Request for one sample.

    Attributes:
      size: (frames, height, width) in pixels.
      grid: (frames, height, width) of the latents.
      seed: seed of the initial noise.
      out: output file.
      classes: requested classes, padded with the null class; None for text.
      prompt, negative: words, or a file of embeddings; None for `negative` means zeros.
      image_embeds: file of image embeddings.
      image_tokens: number of image embeddings in that file; 0 for none.
      first, last: pictures of the first and the last frame.
      frames_per_latent: see `Target`.
    """

    size: Triple
    grid: Triple
    seed: int
    out: Path
    classes: tuple[int, ...] | None
    prompt: Path | str | None
    negative: Path | str | None
    image_embeds: Path | None
    image_tokens: int
    first: Path | None = None
    last: Path | None = None
    frames_per_latent: int = 1

    def shape(self) -> tuple[Any, ...]:
        """Returns a key that is equal for requests that can form one batch."""
        given = (self.image_tokens, self.first is not None, self.last is not None)
        return (self.grid, len(self.classes or ()), *given)


def read_list(path: Path, defaults: Mapping[str, Any]) -> list[RawRequest]:
    """Reads JSON lines, one object per sample; defaults apply to missing values.

    Raises:
      InputError: the list is invalid; the message names file, line and key.
    """
    try:
        lines = read_text(path, "write JSON lines", "utf-8-sig").split("\n")
    except OSError as error:
        place = f"alload sample: --list: {path}"
        raise InputError(f"{place}: {error.strerror}; name a file of JSON lines") from error
    found = [
        _read_line(line, f"{path}: line {number}", path.parent, defaults)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise InputError(f"{path}: holds no lines; write a JSON object for each sample")
    return found


def _inside(folder: Path, value: str, place: str) -> Path:
    """The file to write for a line; it must lie in the list's folder, or be absolute."""
    out = folder / value
    real, root = (Path(os.path.realpath(each)) for each in (out, folder))
    if not Path(value).is_absolute() and not real.is_relative_to(root):
        raise InputError(
            f"{place} is {value!r}, which leaves the list's folder {folder.absolute()}; name a "
            "file in it, or the absolute path"
        )
    return out


def _read_line(line: str, place: str, folder: Path, defaults: Mapping[str, Any]) -> RawRequest:
    fields = parse_json(line, place, "write an object")
    if not isinstance(fields, dict):
        raise InputError(f"{place}: holds {type(fields).__name__}; write an object")
    in_line: dict[str, Any] = {}
    for key, value in fields.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(KEYS)}"
            raise InputError(f"{place}: {key} is unknown; {hint}")
        in_line[key] = _value(key, value, f"{place}: {key}", folder)
    return RawRequest({**defaults, **in_line}, place, frozenset(in_line))


def _value(key: str, value: Any, place: str, folder: Path) -> Any:
    if key in FILES:
        if not isinstance(value, str) or not value or "\0" in value:
            raise InputError(f"{place} is {value!r}; give the name of a file")
        if key == "out":
            return _inside(folder, value, place)
        return folder / value
    if key in WORDS:
        if not isinstance(value, str):
            raise InputError(f"{place} is {value!r}; give words")
        return value
    if key == "class":
        classes = value if isinstance(value, list) else [value]
        if not classes or not all(type(one) is int for one in classes):
            raise InputError(f"{place} is {value!r}; give a whole number, or a list of them")
        return tuple(classes)
    if type(value) is not int:
        raise InputError(f"{place} is {value!r}; give a whole number")
    return value
