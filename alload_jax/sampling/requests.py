"""What `alload sample` is asked for: checked before any weights are read."""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.geometry import Geometry, Triple
from alload_jax.sampling.clips import check_format
from alload_jax.sampling.embeddings import embeddings_shape

NUMBERS = ("frames", "height", "width", "seed")
FILES = ("prompt_embeds", "negative_embeds", "image_embeds", "out")
KEYS = ("class", *NUMBERS, *FILES)
"""What a request may hold; the flags are called likewise."""

_SEEDS = 2**32
_LARGEST = 2**31
"""Of a size, and of the elements of a sample and of its picture."""


class Target(NamedTuple):
    """What requests are checked against.

    Attributes:
      model: that draws.
      vae_stride: pixels per latent.
      text_length: classes of each sample; None for as many as are asked for.
      zoom: of pictures.
    """

    model: ModelConfig
    vae_stride: Triple
    text_length: int | None
    zoom: int

    @property
    def picture_channels(self) -> int | None:
        """1 or 3 where a sample is a picture; None where it is latents of something."""
        plain = self.vae_stride == (1, 1, 1) and self.model.in_channels in (1, 3)
        return self.model.in_channels if plain else None


@dataclass(frozen=True)
class Asked:
    """Values as a user gave them, by the names in `KEYS`.

    Attributes:
      values: those that were given; classes as a tuple, files as paths.
      line: where the list says so, such as `items.jsonl: line 3`; empty for flags.
      own: names of the values that stand in that line.
    """

    values: Mapping[str, Any]
    line: str = ""
    own: frozenset[str] = frozenset()

    def place(self, key: str) -> str:
        """Names a value, for messages."""
        if self.line and (key in self.own or key not in self.values):
            return f"{self.line}: {key}"
        return f"alload sample: --{key.replace('_', '-')}"

    def get(self, key: str) -> Any:
        """A value that must be there.

        Raises:
          InputError: it is not.
        """
        if key not in self.values:
            remedy = f", or --{key} for all" if self.line else ""
            raise InputError(f"{self.place(key)} is not given; give it{remedy}")
        return self.values[key]


class Request(NamedTuple):
    """One sample to draw.

    Attributes:
      grid: latent (frames, height, width).
      seed: of its noise.
      out: the file.
      classes: asked for, filled up with the null class; None for text.
      prompt, negative, image: files of embeddings; negative None stands for zeros.
      image_tokens: of the image embeddings; 0 for none.
    """

    grid: Triple
    seed: int
    out: Path
    classes: tuple[int, ...] | None
    prompt: Path | None
    negative: Path | None
    image: Path | None
    image_tokens: int

    def shape(self) -> tuple[Any, ...]:
        """Equal for requests that can be drawn at once."""
        return (self.grid, len(self.classes or ()), self.image_tokens)


def read_list(path: Path, defaults: Mapping[str, Any]) -> list[Asked]:
    """Reads JSON lines, an object for each sample; what one leaves open the defaults say.

    Raises:
      InputError: naming file, line and key.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        place = f"alload sample: --list: {path}"
        raise InputError(f"{place}: {error.strerror}; name a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is no text ({error}); write JSON lines") from error
    found = [
        _read_line(line, f"{path}: line {number}", path.parent, defaults)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise InputError(f"{path}: holds no lines; write a JSON object for each sample")
    return found


def check_request(asked: Asked, target: Target) -> Request:
    """Checks that a sample can be drawn and written.

    Raises:
      InputError: it cannot, for what it asks for.
    """
    size = (asked.get("frames"), asked.get("height"), asked.get("width"))
    for name, value in zip(("frames", "height", "width"), size, strict=True):
        _check_size(asked, name, value, target)
    if not 0 <= (seed := asked.values.get("seed", 0)) < _SEEDS:
        raise InputError(f"{asked.place('seed')} is {seed}; it must be from 0 to below 2^32")
    out = asked.get("out")
    shown = (size[0], size[1] * target.zoom, size[2] * target.zoom)
    check_format(asked.place("out"), out, shown, target.picture_channels)
    return Request(
        grid=_grid(asked, size, target),
        seed=seed,
        out=out,
        classes=_classes(asked, target),
        prompt=_text(asked, "prompt_embeds", target),
        negative=_text(asked, "negative_embeds", target),
        image=asked.values.get("image_embeds"),
        image_tokens=_image_tokens(asked, target.model),
    )


def _read_line(line: str, place: str, folder: Path, defaults: Mapping[str, Any]) -> Asked:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: is no JSON ({error}); write an object") from error
    if not isinstance(fields, dict):
        raise InputError(f"{place}: holds {type(fields).__name__}; write an object")
    own: dict[str, Any] = {}
    for key, value in fields.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(KEYS)}"
            raise InputError(f"{place}: {key} is unknown; {hint}")
        own[key] = _value(key, value, f"{place}: {key}", folder)
    return Asked({**defaults, **own}, place, frozenset(own))


def _value(key: str, value: Any, place: str, folder: Path) -> Any:
    if key in FILES:
        if not isinstance(value, str) or not value:
            raise InputError(f"{place} is {value!r}; give the name of a file")
        return folder / value
    if key == "class":
        classes = value if isinstance(value, list) else [value]
        if not classes or not all(type(one) is int for one in classes):
            raise InputError(f"{place} is {value!r}; give a whole number, or a list of them")
        return tuple(classes)
    if type(value) is not int:
        raise InputError(f"{place} is {value!r}; give a whole number")
    return value


def _check_size(asked: Asked, name: str, value: int, target: Target) -> None:
    """Sizes must be whole patches of whole latents; the first frame has a latent of its own."""
    axis = ("frames", "height", "width").index(name)
    stride, patch = target.vae_stride[axis], target.model.patch_size[axis]
    if value > _LARGEST:
        raise InputError(f"{asked.place(name)} is {value}; it must be at most {_LARGEST}")
    begin = 1 - stride if name == "frames" else 0
    step = stride * patch
    whole = (value - begin) // step
    if whole >= 1 and begin + whole * step == value:
        return
    near = [str(begin + n * step) for n in (whole, whole + 1) if n >= 1]
    raise InputError(
        f"{asked.place(name)} is {value}, which a VAE stride of {stride} and patches of {patch} "
        f"don't divide; nearest: {' and '.join(near or [str(begin + step)])}"
    )


def _grid(asked: Asked, size: Triple, target: Target) -> Triple:
    """Latent (frames, height, width) of a sample that is not absurdly large."""
    geometry = Geometry(target.vae_stride, target.model.patch_size)
    found = geometry.latent_grid(*(np.array([part]) for part in size))[0].tolist()
    shown = math.prod(size) * (target.zoom**2 * 3 if target.picture_channels else 0)
    if math.prod(found) * target.model.in_channels > _LARGEST or shown > _LARGEST:
        frames, height, width = size
        raise InputError(
            f"{asked.place('frames')} {frames} with height {height} and width {width} has more "
            f"than {_LARGEST} values; choose a smaller size"
        )
    return (found[0], found[1], found[2])


def _classes(asked: Asked, target: Target) -> tuple[int, ...] | None:
    classes, count = asked.values.get("class"), target.model.num_classes
    if target.model.text:
        if classes is not None:
            raise InputError(
                f"{asked.place('class')} is given, but the model's condition is text; "
                "give prompt embeddings"
            )
        return None
    if classes is None:
        raise InputError(f"{asked.place('class')} is not given; the model's condition is classes")
    if wrong := [one for one in classes if not 0 <= one < count]:
        raise InputError(f"{asked.place('class')} is {wrong[0]}; classes are from 0 to {count - 1}")
    length = len(classes) if target.text_length is None else target.text_length
    if len(classes) > length:
        raise InputError(
            f"{asked.place('class')} asks for {len(classes)} classes, but no sample of the data "
            f"has more than {length}; ask for at most that"
        )
    return tuple(classes) + (count,) * (length - len(classes))


def _text(asked: Asked, key: str, target: Target) -> Path | None:
    """A file of text embeddings that the model can take."""
    file, text = asked.values.get(key), target.model.text
    if file is None:
        if text and key == "prompt_embeds":
            raise InputError(f"{asked.place(key)} is not given; the model's condition is text")
        return None
    if text is None:
        raise InputError(
            f"{asked.place(key)} is given, but the model's condition is classes; give classes"
        )
    tokens = _tokens(asked, key, "text", text.dim)
    if tokens > text.length:
        raise InputError(
            f"{asked.place(key)}: {file} has {tokens} tokens, but the model takes {text.length}; "
            "cut it"
        )
    return file


def _image_tokens(asked: Asked, model: ModelConfig) -> int:
    place = asked.place("image_embeds")
    given = "image_embeds" in asked.values
    if model.image is None:
        if given:
            raise InputError(f"{place} is given, but the model takes no image; leave it out")
        return 0
    if not given:
        raise InputError(f"{place} is not given; the model takes [N, {model.image.dim}] of them")
    tokens = _tokens(asked, "image_embeds", "image", model.image.dim)
    if model.image.positions not in (None, tokens):
        raise InputError(
            f"{place}: {asked.values['image_embeds']} has {tokens} tokens, but the model takes "
            f"exactly {model.image.positions}"
        )
    return tokens


def _tokens(asked: Asked, key: str, name: str, dim: int) -> int:
    """How many embeddings a file holds; all are read and checked."""
    path = asked.values[key]
    shape = embeddings_shape(path, name)
    if len(shape) != 2 or shape[0] < 1 or shape[1] != dim:
        raise InputError(
            f"{asked.place(key)}: {path} holds {list(shape)}, but the model takes [tokens, {dim}]"
        )
    return shape[0]
