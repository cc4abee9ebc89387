"""Encodes one sample as bytes, in safetensors format, so that reading never runs code.

G. Steele, D. Lea and C. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from alload_jax.files import Json
from alload_jax.planning.samples import Triple


def mixed(state: np.ndarray) -> np.ndarray:
    """Mixes numbers by SplitMix64: uint64 of any shape to others, equal for equal numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return state ^ (state >> np.uint64(31))


def unit_interval(state: np.ndarray) -> np.ndarray:
    """Mixes numbers uniformly into the unit interval.

    Args:
      state: uint64 of any shape.

    Returns:
      float64 from 0 to below 1, shaped like `state`; equal for equal numbers.
    """
    return (mixed(state) >> np.uint64(11)) / 2.0**53


LATENTS = "latents"
"""[frames, height, width, channels], the data that the model learns to generate."""
LABELS = "labels"
"""[L] int32, the classes of the sample."""
TEXT = "text"
"""[L, width], text embeddings of the sample, instead of classes."""
GIVEN = "given"
"""[frames, height, width, channels], what an image-to-video model takes beside noisy latents."""
IMAGE = "image"
"""[N, width], embeddings of the given image."""

NAMED = (LATENTS, LABELS, TEXT, GIVEN, IMAGE)
"""Arrays that every model may use. Others are condition tokens [L, width] of further kinds, by the
names of the models' `condition_parts`; further texts of a sample are `text.1` and so on."""

Arrays = Mapping[str, np.ndarray]
"""The arrays of a sample by name."""

_BITS = (64, 32, 16, 8)
DTYPES = {
    f"{kind[0].upper()}{bits}": np.dtype(f"{kind}{bits}")
    for kind, sizes in (("float", (64, 32, 16)), ("int", _BITS), ("uint", _BITS))
    for bits in sizes
} | {"BF16": np.dtype(ml_dtypes.bfloat16), "BOOL": np.dtype(bool)}
"""The dtypes that are supported, by their names in safetensors."""


def encode(arrays: dict[str, np.ndarray]) -> bytes:
    """Encodes the arrays of one sample.

    Raises:
      ValueError: an array has a dtype that `decode` does not support.
    """
    known = set(DTYPES.values())
    native = {}
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("=")
        if dtype not in known:
            raise ValueError(f"{name} is {dtype}; supported are {', '.join(map(str, known))}")
        native[name] = np.asarray(array, dtype, order="C")
    return safetensors.numpy.save(native)


def decode(record: bytes) -> dict[str, np.ndarray]:
    """Decodes the arrays of one sample; unlike safetensors' NumPy reader it supports bfloat16.

    Raises:
      ValueError: the bytes are not a safetensors record, or a dtype is not supported.
    """
    try:
        views = safetensors.deserialize(record)
    except safetensors.SafetensorError as error:
        raise ValueError(f"not a safetensors record ({error})") from error
    arrays = {}
    for name, view in views:
        if view["dtype"] not in DTYPES:
            raise ValueError(
                f"{name} is {view['dtype']}; of the safetensors dtypes, a record may hold "
                f"{', '.join(DTYPES)}"
            )
        flat = np.frombuffer(view["data"], DTYPES[view["dtype"]])
        arrays[name] = flat.reshape(view["shape"])
    return arrays


def checksum(record: bytes) -> int:
    """Returns the CRC-32 of a record, which manifests store."""
    return zlib.crc32(record)


class SampleForm(NamedTuple):
    """The arrays of a sample beside its latents.

    Attributes:
      text_dim: width of the text embeddings; None for classes.
      given_channels: channels that an image-to-video model takes beside the noisy latents; 0 if
        none are stored.
      image_shape: (tokens, width) of the image embeddings; None if none are stored.
      parts: (name, width) of further kinds of condition tokens, by name.
    """

    text_dim: int | None = None
    given_channels: int = 0
    image_shape: tuple[int, int] | None = None
    parts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_notes(cls, notes: Json) -> Self:
        """The form that a manifest's notes describe; what they lack is not stored."""
        shape = notes.get("image_shape")
        return cls(
            notes.get("text_dim"),
            notes.get("given_channels", 0),
            (shape[0], shape[1]) if shape else None,
            tuple(sorted(notes.get("parts", {}).items())),
        )

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The form of the arrays of one record."""
        image = arrays.get(IMAGE)
        return cls(
            arrays[TEXT].shape[1] if TEXT in arrays else None,
            arrays[GIVEN].shape[-1] if GIVEN in arrays else 0,
            (image.shape[0], image.shape[1]) if image is not None else None,
            tuple((name, arrays[name].shape[1]) for name in part_names(arrays)),
        )

    def notes(self) -> Json:
        """The form as JSON values; what is not stored is left out, but for the kind of text."""
        image, parts = list(self.image_shape or ()), dict(self.parts)
        held = {"given_channels": self.given_channels, "image_shape": image, "parts": parts}
        return {"text_dim": self.text_dim} | {name: value for name, value in held.items() if value}

    def shapes(
        self, latents: tuple[int, ...], text_length: int, part_lengths: Sequence[int] = ()
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of a record's arrays.

        Args:
          latents: (frames, height, width, channels) of the latents.
          text_length: number of condition tokens.
          part_lengths: number of tokens of each of `parts`.
        """
        shapes = {LATENTS: latents}
        if self.text_dim is None:
            shapes[LABELS] = (text_length,)
        else:
            shapes[TEXT] = (text_length, self.text_dim)
        if self.given_channels:
            shapes[GIVEN] = (*latents[:3], self.given_channels)
        if self.image_shape:
            shapes[IMAGE] = self.image_shape
        for (name, width), length in zip(self.parts, part_lengths, strict=True):
            shapes[name] = (length, width)
        return shapes

    def described(self) -> dict[str, str]:
        """The form in words, by name."""
        image = self.image_shape
        return {
            "condition": "classes" if self.text_dim is None else f"text of width {self.text_dim}",
            "given": f"{self.given_channels} channels" if self.given_channels else "none",
            "image": f"{image[0]} embeddings of width {image[1]}" if image else "none",
            "parts": ", ".join(f"{name} of width {width}" for name, width in self.parts) or "none",
        }


def part_names(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Names of the arrays of a record that are condition tokens of further kinds, sorted."""
    return sorted(name for name in arrays if name not in NAMED and "." not in name)


_STREAM = 2
"""Tells these draws from others of the same seed."""


def with_alternatives(
    arrays: dict[str, np.ndarray],
    alternatives: Sequence[np.ndarray],
    parts: Sequence[Mapping[str, np.ndarray]] = (),
) -> dict[str, np.ndarray]:
    """A record's arrays with further conditions of the sample, `text.1`, `text.2` and so on.

    Args:
      arrays: of the record, with its first condition.
      alternatives: [L, width] or [L] each, as the first.
      parts: for each alternative its tokens of further kinds by name, stored as `glyphs.1` and so
        on; kinds that are left out are those of the first condition.
    """
    name, found = _name(arrays), dict(arrays)
    found |= {f"{name}.{number}": other for number, other in enumerate(alternatives, 1)}
    for kind in dict.fromkeys(kind for kinds in parts for kind in kinds):
        for number, kinds in enumerate(parts, 1):  # without gaps, so that `texts_of` finds all
            found[f"{kind}.{number}"] = kinds.get(kind, arrays[kind])
    return found


def texts_of(arrays: Arrays, name: str | None = None) -> list[np.ndarray]:
    """All conditions of a sample, of [L, width] or [L] each; usually one.

    Args:
      arrays: of the sample.
      name: `TEXT` or `LABELS`, None for what there is of them; or a further kind of tokens.
    """
    name = name or _name(arrays)
    found = [arrays[name]]
    while (other := arrays.get(f"{name}.{len(found)}")) is not None:
        found.append(other)
    return found


def with_text_of_epoch(
    arrays: dict[str, np.ndarray], seed: int, epoch: int, sample: int, dropout: float = 0.0
) -> dict[str, np.ndarray]:
    """The arrays with one of the sample's texts as its text, drawn from seed, epoch and sample.

    Tokens of further kinds are those of that text.

    Args:
      arrays: of the sample; returned as they are if it has one text.
      seed: of the run.
      epoch: as `noise_epoch` numbers it, so that repetitions draw anew.
      sample: the sample's number.
      dropout: share of the times that the texts have no tokens.
    """
    texts = texts_of(arrays)
    if len(texts) == 1 and not dropout:
        return arrays
    sequence = np.random.SeedSequence(seed, spawn_key=(_STREAM, epoch, sample))
    drawn, dropped = sequence.generate_state(2).tolist()
    if dropped < dropout * 2**32:
        return arrays | {name: arrays[name][:0] for name in (_name(arrays), *part_names(arrays))}
    number = drawn % len(texts)
    kinds = {kind: arrays.get(f"{kind}.{number}") for kind in part_names(arrays)}
    taken = {kind: tokens for kind, tokens in kinds.items() if tokens is not None}
    return arrays | taken | {_name(arrays): texts[number]}


def _name(arrays: Arrays) -> str:
    return TEXT if TEXT in arrays else LABELS


# ---------------------------------------------------------------- pixels in place of latents
# With n frames to a latent, the first frame has one of its own, n times over, and each of the
# others holds the next n frames in its channels: time as in the causal VAEs of video models.


def pixel_channels(vae_stride: Triple, channels: int) -> int | None:
    """Channels of the pixels that latents hold.

    Args:
      vae_stride: pixels per latent, (frames, height, width).
      channels: of a latent.

    Returns:
      1 (grey) or 3 (colour); None if the latents are a VAE's.
    """
    frames, *sides = vae_stride
    found, rest = divmod(channels, frames)
    return found if sides == [1, 1] and rest == 0 and found in (1, 3) else None


def fold_frames(frames: np.ndarray, per_latent: int) -> np.ndarray:
    """[per_latent · n + 1, H, W, C] pixels → [n + 1, H, W, per_latent · C] latents."""
    padded = np.concatenate([np.repeat(frames[:1], per_latent - 1, axis=0), frames])
    groups = padded.reshape(-1, per_latent, *frames.shape[1:])
    return np.moveaxis(groups, 1, -2).reshape(len(groups), *frames.shape[1:3], -1)


def unfold_frames(latents: np.ndarray, per_latent: int) -> np.ndarray:
    """[..., n + 1, H, W, per_latent · C] latents → [..., per_latent · n + 1, H, W, C] pixels.

    The first frame is the mean of its copies, which differ in what a model generates.
    """
    *others, groups, height, width, channels = latents.shape
    shape = (*others, groups, height, width, per_latent, channels // per_latent)
    frames = np.moveaxis(latents.reshape(shape), -2, -4)
    first = frames[..., :1, :, :, :, :].mean(axis=-4)
    later = frames[..., 1:, :, :, :, :]
    later = later.reshape(*others, (groups - 1) * per_latent, *later.shape[-3:])
    return np.concatenate([first, later], axis=-4)
