"""Requests of `alload sample`, from flags or from a list: their checks, their condition arrays."""

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from alload_jax.data.condition import Conditions, put_condition
from alload_jax.data.record import GIVEN, IMAGE, TEXT, pixel_channels, unfold_frames
from alload_jax.encoders.vae import Vae
from alload_jax.errors import InputError
from alload_jax.files import parse_json, read_text
from alload_jax.models.common.config import ConditionPart, ModelConfig
from alload_jax.models.common.embedding import ConditionTokens
from alload_jax.models.families import family_of
from alload_jax.planning.samples import Geometry, Triple
from alload_jax.sampling.encoders import Encoders, as_latent, read_picture, read_tensors
from alload_jax.sampling.flow import Condition
from alload_jax.sampling.pictures import check_format
from alload_jax.sharding.host_memory import host_bytes

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
      batch: samples that are drawn together.
    """

    model: ModelConfig
    vae_stride: Triple
    text_length: int | None
    zoom: int
    encoders: Encoders = Encoders()
    trained_null: bool = True
    batch: int = 1

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
            others = [f"--{each}" for each in ("height", "width", "out") if each not in self.values]
            more = f", nor {', '.join(others)}" if key == "frames" and others else ""
            raise InputError(f"{self.place(key)} is not given{more}; give it{remedy}")
        return self.values[key]


TextInput = Mapping[str, np.ndarray] | str | None
"""Words, or embeddings [L, width] float32 by kind; None for none."""


class Request(NamedTuple):
    """Request for one sample.

    Attributes:
      size: (frames, height, width) in pixels.
      grid: (frames, height, width) of the latents.
      seed: seed of the initial noise.
      out: output file.
      classes: requested classes, padded with the null class; None for text.
      prompt, negative: words, or embeddings [L, width] by kind; None for `negative` means zeros.
      image_embeds: [N, width] image embeddings of a file.
      given: [*grid, channels], the given frame and its mask of that file.
      first, last: pictures of the first and the last frame.
      frames_per_latent: see `Target`.
    """

    size: Triple
    grid: Triple
    seed: int
    out: Path
    classes: tuple[int, ...] | None
    prompt: TextInput
    negative: TextInput
    image_embeds: np.ndarray | None
    given: np.ndarray | None
    first: Path | None = None
    last: Path | None = None
    frames_per_latent: int = 1

    def shape(self) -> tuple[Any, ...]:
        """Returns a key that is equal for requests that can form one batch."""
        image = 0 if self.image_embeds is None else len(self.image_embeds)
        given = (image, self.first is not None, self.last is not None)
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
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        fields = parse_json(line, place, "write an object")
        if not isinstance(fields, dict):
            raise InputError(f"{place}: holds {type(fields).__name__}; write an object")
        in_line: dict[str, Any] = {}
        for key, value in fields.items():
            if key not in KEYS:
                near = difflib.get_close_matches(key, KEYS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(KEYS)}"
                raise InputError(f"{place}: {key} is unknown; {hint}")
            in_line[key] = _value(key, value, f"{place}: {key}", path.parent)
        found.append(RawRequest({**defaults, **in_line}, place, frozenset(in_line)))
    if not found:
        raise InputError(f"{path}: holds no lines; write a JSON object for each sample")
    return found


def _value(key: str, value: Any, place: str, folder: Path) -> Any:
    """A value of a line after checking its type; files as paths in the list's folder."""
    if key in FILES:
        if not isinstance(value, str) or not value or "\0" in value:
            raise InputError(f"{place} is {value!r}; give the name of a file")
        file = folder / value
        real, root = (Path(os.path.realpath(each)) for each in (file, folder))
        # What is written must lie in the list's folder, or be absolute.
        if key == "out" and not Path(value).is_absolute() and not real.is_relative_to(root):
            raise InputError(
                f"{place} is {value!r}, which leaves the list's folder {folder.absolute()}; name a "
                "file in it, or the absolute path"
            )
        return file
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


_SEEDS = 2**32
_LARGEST = 2**31
"""Maximum size along an axis, and maximum number of elements of a sample and of its picture."""


def check_request(raw: RawRequest, target: Target) -> Request:
    """Checks that a sample can be generated and written.

    Raises:
      InputError: a value is missing or invalid.
    """
    size = (raw.get("frames"), raw.get("height"), raw.get("width"))
    names = ("frames", "height", "width")
    axes = zip(names, size, target.vae_stride, target.model.patch_size, strict=True)
    for name, value, stride, patch in axes:
        if value > _LARGEST:
            raise InputError(f"{raw.place(name)} is {value}; it must be at most {_LARGEST}")
        # A whole number of patches; the first frame has a separate latent.
        begin, step = 1 - stride if name == "frames" else 0, stride * patch
        whole = (value - begin) // step
        if whole < 1 or begin + whole * step != value:
            near = [str(begin + n * step) for n in (whole, whole + 1) if n >= 1]
            raise InputError(
                f"{raw.place(name)} is {value}, which a VAE stride of {stride} and patches of "
                f"{patch} don't divide; nearest: {' and '.join(near or [str(begin + step)])}"
            )
    if not 0 <= (seed := raw.values.get("seed", 0)) < _SEEDS:
        raise InputError(f"{raw.place('seed')} is {seed}; it must be from 0 to below 2^32")
    out = raw.get("out")
    picture_size = (size[0], size[1] * target.zoom, size[2] * target.zoom)
    check_format(raw.place("out"), out, picture_size, target.picture_channels)
    _check_given(raw, target, size)
    grid, classes = _grid(raw, size, target), _classes(raw, target)
    prompt = _text(raw, "prompt", "prompt_embeds", target)
    negative = _text(raw, "negative_prompt", "negative_embeds", target)
    image_embeds, given = _image_embeddings(raw, target, grid)
    return Request(
        size=size,
        grid=grid,
        seed=seed,
        out=out,
        classes=classes,
        prompt=prompt,
        negative=negative,
        image_embeds=image_embeds,
        given=given,
        first=raw.values.get("image"),
        last=raw.values.get("last_image"),
        frames_per_latent=target.frames_per_latent,
    )


def _grid(raw: RawRequest, size: Triple, target: Target) -> Triple:
    """Returns (frames, height, width) of the latents after checking the number of elements."""
    geometry = Geometry(target.vae_stride, target.model.patch_size)
    found = geometry.latent_grid(*(np.array([part]) for part in size))[0].tolist()
    picture_size = math.prod(size) * (target.zoom**2 * 3 if target.picture_channels else 0)
    place = f"{raw.place('frames')} {size[0]} with height {size[1]} and width {size[2]}"
    if math.prod(found) * target.model.in_channels > _LARGEST or picture_size > _LARGEST:
        raise InputError(f"{place} has more than {_LARGEST} values; choose a smaller size")
    tokens = math.prod(found) // math.prod(target.model.patch_size)
    require_memory(place, target.model, tokens, target.batch)
    return (found[0], found[1], found[2])


def require_memory(place: str, model: ModelConfig, tokens: int, batch: int) -> None:
    """Checks that a device holds what drawing takes at the very least, before it is compiled.

    Args:
      place: what is drawn, for the message.
      model: config of the model.
      tokens: of a sample.
      batch: samples that are drawn together.

    Raises:
      InputError: it does not.
    """
    widths, device = model.architecture(), jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") or host_bytes()
    # A layer's input, query, key and value of 16 bits. XLA's attention has float32 of all pairs.
    least = 4 * 2 * widths.get("dim", 0) * tokens
    if device.platform == "cpu" and model.sparse_attention is None:
        least += 4 * widths.get("num_heads", 0) * tokens**2
    if least * batch > limit:
        raise InputError(
            f"{place} takes more than {least * batch / 1e9:,.0f} GB for {batch} at a time, and "
            f"there are {limit / 1e9:,.0f} GB; choose a smaller size"
            + (", or draw fewer at a time" if batch > 1 else "")
        )


def _classes(raw: RawRequest, target: Target) -> tuple[int, ...] | None:
    classes, count = raw.values.get("class"), target.model.num_classes
    if target.model.text:
        if classes is not None:
            raise InputError(
                f"{raw.place('class')} is given, but the model's condition is text; give a prompt"
            )
        return None
    if classes is None:
        raise InputError(f"{raw.place('class')} is not given; the model's condition is classes")
    if wrong := [one for one in classes if not 0 <= one < count]:
        raise InputError(f"{raw.place('class')} is {wrong[0]}; classes are from 0 to {count - 1}")
    length = len(classes) if target.text_length is None else target.text_length
    if len(classes) > length:
        raise InputError(
            f"{raw.place('class')} lists {len(classes)} classes, but no sample of the data "
            f"has more than {length}; give at most {length}"
        )
    return tuple(classes) + (count,) * (length - len(classes))


def _text(raw: RawRequest, words_key: str, key: str, target: Target) -> TextInput:
    """Returns words, or the embeddings of a file after checking that they fit the model."""
    words, file, text = raw.values.get(words_key), raw.values.get(key), target.model.text
    if words is None and file is None:
        if text and words_key == "prompt":
            raise InputError(
                f"{raw.place(words_key)} is not given; the model's condition is text: give a "
                f"prompt, or {key}"
            )
        empty = text and not target.trained_null and target.encoders.text is not None
        return "" if empty else None
    given = key if words is None else words_key
    if text is None:
        raise InputError(
            f"{raw.place(given)} is given, but the model's condition is classes; give classes"
        )
    if words is not None and file is not None:
        raise InputError(f"{raw.place(words_key)} is given beside {key}; leave one out")
    if words is not None:
        if target.encoders.text is None:
            raise InputError(
                f"{raw.place(words_key)} needs an encoder; give --text-encoder (in a config: "
                f"sampling.encoders.text), a local folder of the model's text encoder, or {key}"
            )
        return str(words)
    kinds = {part.name: part for part in target.model.condition_parts() if part.name != IMAGE}
    names = tuple(dict.fromkeys((TEXT, *kinds)))
    found = read_tensors(file := raw.values[key], names, may_hold_others=not kinds)
    _require_shape(raw, key, found[TEXT], text.dim)
    if (count := len(found[TEXT])) > text.length:
        raise InputError(
            f"{raw.place(key)}: {file} has {count} tokens, but the model takes {text.length}; "
            "shorten it"
        )
    for name, part in kinds.items():
        if name not in found and part.required:
            raise InputError(
                f"{file}: has no tensor {name}, which the model takes too; write "
                f"[{part.length}, {part.width}] of it there"
            )
        shape = found[name].shape if name in found else (0, part.width)
        if len(shape) != 2 or shape[1] != part.width or shape[0] > part.length:
            raise InputError(
                f"{file}: {name} has shape {list(shape)}, but the model takes up to "
                f"[{part.length}, {part.width}]; write embeddings of its own encoder"
            )
    return found


def _image_embeddings(
    raw: RawRequest, target: Target, grid: Triple
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the image embeddings, and the given frame and its mask, of a file; None for none."""
    place, model = raw.place("image_embeds"), target.model
    given = "image_embeds" in raw.values
    if model.image is None:
        if given:
            raise InputError(f"{place} is given, but the model takes no image; remove it")
        return None, None
    has_image = "image" in raw.values
    is_encoded = has_image and target.encoders.image is not None
    if is_encoded and given:
        raise InputError(f"{place} is given beside --image with --image-encoder; leave one out")
    if not given:
        if is_encoded or (model.given_optional and not has_image):
            return None, None
        raise InputError(
            f"{place} is not given; the model takes [N, {model.image.dim}] of them: give them, or "
            "--image with --image-encoder"
        )
    path, takes_given = raw.values["image_embeds"], model.given_channels and not has_image
    found = read_tensors(path, (IMAGE, GIVEN) if takes_given else (IMAGE,))
    _require_shape(raw, "image_embeds", found[IMAGE], model.image.dim)
    tokens = len(found[IMAGE])
    lengths = {part.name: part.length for part in model.condition_parts()}
    exact = model.image.positions
    if exact not in (None, tokens) or tokens > lengths.get(IMAGE, tokens):
        most = f"up to {lengths[IMAGE]}" if exact in (None, tokens) else f"exactly {exact}"
        raise InputError(f"{place}: {path} has {tokens} tokens, but the model takes {most}")
    in_file, shape = found.get(GIVEN), (*grid, model.given_channels)
    if takes_given and (in_file is None or in_file.shape != shape):
        held = "no tensor" if in_file is None else f"{list(in_file.shape)}"
        raise InputError(
            f"{path}: holds {held} of the name {GIVEN}, but the model takes the latents of the "
            f"given frame and its mask, {list(shape)}; write them there"
        )
    return found[IMAGE], in_file


def _check_given(raw: RawRequest, target: Target, size: Triple) -> None:
    """Checks that the model takes the given frames, and has those that it needs.

    Raises:
      InputError: a frame is missing or cannot be used.
    """
    model, place = target.model, raw.place("image")
    if "image" not in raw.values:
        if "last_image" in raw.values:
            raise InputError(f"{place} is not given, but last_image is; give both")
        if model.given_channels and not model.given_optional:
            raise InputError(f"{place} is not given; this image-to-video model needs a first frame")
        return
    vae, channels = target.encoders.vae, model.given_channels
    if not channels and (not family_of(model).has_first_frame_timestep or model.patch_size[0] != 1):
        raise InputError(f"{place} is given, but the model cannot take a first frame; remove it")
    if vae is None and (channels or target.picture_channels is None):
        raise InputError(f"{place} needs --vae, a local folder of the model's VAE")
    if "last_image" in raw.values and not (channels and vae and vae.takes_last_frame):
        raise InputError(
            f"{raw.place('last_image')}: the model takes a first frame only; remove it"
        )
    if size[0] == 1 and not channels:
        raise InputError(f"{place} is given, but --frames is 1; choose more frames")


def _require_shape(raw: RawRequest, key: str, found: np.ndarray, dim: int) -> None:
    """Refuses embeddings of a file that are not [tokens, dim]."""
    if found.ndim != 2 or len(found) < 1 or found.shape[1] != dim:
        raise InputError(
            f"{raw.place(key)}: {raw.values[key]} holds {list(found.shape)}, but the model takes "
            f"[tokens, {dim}]"
        )


# ---------------------------------------------------------------- what a model is given


def decoded(latents: np.ndarray, request: Request, vae: Vae | None) -> np.ndarray:
    """The picture of a sample: decoded by the VAE, or the pixels that the latents are.

    Args:
      latents: [frames, height, width, channels] of the request's grid.
      request: what was asked for.
      vae: the VAE; None if the latents are pixels.
    """
    if vae is not None:
        return vae.decode(latents)
    return unfold_frames(latents, request.frames_per_latent)


def family_fps(model: ModelConfig, vae_stride: Triple | None) -> float | None:
    """Frames per second of the videos of a model's family.

    Args:
      model: config of the model.
      vae_stride: pixels per latent, (frames, height, width); None if it is not known.

    Returns:
      None if the family names none, or if its latents have another stride.
    """
    defaults = family_of(model).sampling_defaults(model)
    return defaults.fps if vae_stride in (None, defaults.vae_stride) else None


class RequestArrays(NamedTuple):
    """Condition and null condition of one request, each part without the batch's axis."""

    condition: Condition
    null: Condition


def arrays_of(request: Request, model: ModelConfig, encoders: Encoders) -> RequestArrays:
    """Reads or encodes what a request names, float32 or int32 in host memory.

    Raises:
      InputError: a picture cannot be read, or an encoder does not give what the model takes.
    """
    image, *given = _given(request, model, encoders)
    sources = (request.prompt, request.negative)
    both: PyTree
    if model.condition_parts():
        both = [_parts(_by_kind(source, encoders), image, model) for source in sources]
        image = None  # it is one of the parts
    elif model.text is None:
        classes = np.array(request.classes, np.int32)
        both = classes, np.full_like(classes, model.num_classes)
    else:
        part = ConditionPart(TEXT, model.text.dim, model.text.length)
        both = Conditions(part.length, np.dtype(np.float32), part.width, 0).empty(2)
        for row, source in enumerate(sources):
            put_condition(both, row, 0, 0, _tokens(_by_kind(source, encoders), part))
    return RequestArrays(*(Condition(tokens, image, *given) for tokens in both))


def stacked(arrays: Sequence[RequestArrays]) -> RequestArrays:
    """Condition and null condition of a batch of requests with equal `Request.shape()`."""
    return jax.tree.map(lambda *parts: np.stack(parts), *arrays)


def _parts(
    by_kind: Mapping[str, np.ndarray], image: np.ndarray | None, model: ModelConfig
) -> dict[str, ConditionTokens]:
    """The parts of a condition, without the batch's axis."""
    found: dict[str, np.ndarray] = {}
    parts = []
    for part in model.condition_parts():
        if part.name == IMAGE:
            tokens = np.zeros((0, part.width), np.float32) if image is None else image
            # Requests of a batch have equally many tokens of their images alone.
            part = part._replace(length=len(tokens))
        else:
            tokens = _tokens(by_kind, part)
        found[part.name] = tokens
        parts.append(part)
    held = Conditions(0, np.dtype(np.float32), None, 0, parts=tuple(parts)).empty(1)
    put_condition(held, 0, 0, 0, found)
    return jax.tree.map(lambda each: each[0], held)


def _by_kind(source: TextInput, encoders: Encoders) -> Mapping[str, np.ndarray]:
    """The tokens of a condition by kind; words are encoded."""
    return encoders.encoded(source) if isinstance(source, str) else source or {}


def _tokens(by_kind: Mapping[str, np.ndarray], part: ConditionPart) -> np.ndarray:
    """The tokens of a kind, [L, width] float32; none where there are none.

    Raises:
      InputError: those of an encoder do not fit the model.
    """
    tokens = by_kind.get(part.name, np.zeros((0, part.width), np.float32))[: part.length]
    if tokens.shape[1] != part.width:
        raise InputError(
            f"--text-encoder: gives {part.name} of width {tokens.shape[1]}, but the model "
            f"takes {part.width}; name the encoder that the model was trained with"
        )
    return tokens


def _given(
    request: Request, model: ModelConfig, encoders: Encoders
) -> tuple[np.ndarray | None, ...]:
    """Image embeddings, given channels and first latent frame; None where there are none.

    Raises:
      InputError: a picture cannot be read, or what is given does not fit the model.
    """
    embeddings, given = request.image_embeds, request.given
    if request.first is None:
        if given is None and model.given_channels:  # as in training without an image
            given = np.zeros((*request.grid, model.given_channels), np.float32)
        return embeddings, given, None
    first, last = (
        None if path is None else read_picture(path, *request.size[1:])
        for path in (request.first, request.last)
    )
    assert first is not None
    if encoders.image is not None:
        pictures = [first] if last is None else [first, last]
        embeddings = np.concatenate([encoders.image.encode(picture) for picture in pictures])
        if model.image and model.image.positions not in (None, len(embeddings)):
            raise InputError(
                f"{request.first}: gives {len(embeddings)} image embeddings, but the model takes "
                f"{model.image.positions}; it needs a first and a last frame"
            )
    if not model.given_channels:
        if encoders.vae is None:
            return embeddings, None, as_latent(first, model.in_channels, request.frames_per_latent)
        return embeddings, None, encoders.vae.latents(first[None])
    assert encoders.vae is not None
    given = encoders.vae.encode_given(first, last, request.size[0])
    if given.shape[-1] != model.given_channels:
        raise InputError(
            f"{request.first}: the VAE gives {given.shape[-1]} channels, but the model takes "
            f"{model.given_channels} beside its latents; name the VAE it was trained with"
        )
    return embeddings, given, None
