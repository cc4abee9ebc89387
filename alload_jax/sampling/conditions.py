"""Builds the condition arrays of requests, and decodes what is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from alload_jax.data.pixel_latents import unfold_frames
from alload_jax.data.record import GIVEN, IMAGE, TEXT
from alload_jax.errors import InputError
from alload_jax.models.common.config import ConditionPart, ModelConfig
from alload_jax.models.common.embedding import ConditionTokens
from alload_jax.models.common.segments import PADDING, Segments
from alload_jax.models.families import family_of
from alload_jax.planning.samples import Triple
from alload_jax.sampling.encoders import (
    Encoders,
    as_latent,
    read_embeddings,
    read_optional,
    read_picture,
    refuse_others,
)
from alload_jax.sampling.flow import Condition
from alload_jax.sampling.requests import Request

if TYPE_CHECKING:
    from alload_jax.encoders.vae import Vae


def decoded(latents: np.ndarray, request: Request, vae: "Vae | None") -> np.ndarray:
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
    if model.condition_parts():
        parts, null_parts = (
            _parts(source, image, model, encoders) for source in (request.prompt, request.negative)
        )
        return RequestArrays(Condition(parts, None, *given), Condition(null_parts, None, *given))
    if model.text is None:
        tokens = np.array(request.classes, np.int32)
        null = np.full_like(tokens, model.num_classes)
        return RequestArrays(Condition(tokens, image, *given), Condition(null, image, *given))
    part = ConditionPart(TEXT, model.text.dim, model.text.length)
    text, negative = (
        _padded(_tokens(source, _encoded(source, encoders), part), part.length)
        for source in (request.prompt, request.negative)
    )
    return RequestArrays(Condition(text, image, *given), Condition(negative, image, *given))


def stacked(arrays: Sequence[RequestArrays]) -> tuple[Condition, Condition]:
    """Condition and null condition of a batch of requests with equal `Request.shape()`."""
    found = jax.tree.map(lambda *parts: np.stack(parts), *arrays)
    return found.condition, found.null


def _padded(tokens: np.ndarray, length: int) -> np.ndarray:
    """Tokens [L, width] with zeros behind them, [length, width]."""
    padded = np.zeros((length, tokens.shape[1]), np.float32)
    padded[: len(tokens)] = tokens
    return padded


def _parts(
    source: Path | str | None, image: np.ndarray | None, model: ModelConfig, encoders: Encoders
) -> dict[str, ConditionTokens]:
    """The parts of a condition, without the batch's axis; a file of text may hold others too."""
    found, tokens_by_kind = {}, _encoded(source, encoders)
    if isinstance(source, Path):
        refuse_others(source, [p.name for p in model.condition_parts() if p.name != IMAGE])
    for part in model.condition_parts():
        if part.name == IMAGE:
            tokens = np.zeros((0, part.width), np.float32) if image is None else image
        else:
            tokens = _tokens(source, tokens_by_kind, part)
        # Requests of a batch have equally many tokens of their images alone.
        room = len(tokens) if part.name == IMAGE else part.length
        ids = np.full(room, PADDING, np.int32)
        ids[: len(tokens)] = 0
        length = np.array([len(tokens)], np.int32)
        segments = Segments(np.zeros_like(length), length, ids)
        found[part.name] = ConditionTokens(_padded(tokens, room), segments)
    return found


def _encoded(source: Path | str | None, encoders: Encoders) -> Mapping[str, np.ndarray]:
    """The tokens of words by kind; none of a file of embeddings."""
    return encoders.encoded(source) if isinstance(source, str) else {}


def _tokens(
    source: Path | str | None, encoded: Mapping[str, np.ndarray], part: ConditionPart
) -> np.ndarray:
    """The tokens of a kind, [L, width] float32; none where the source has none.

    Raises:
      InputError: they do not fit the model, or a value of a file is not finite.
    """
    none = np.zeros((0, part.width), np.float32)
    if not isinstance(source, Path):
        tokens = encoded.get(part.name, none)[: part.length]
        if tokens.shape[1] != part.width:
            raise InputError(
                f"--text-encoder: gives {part.name} of width {tokens.shape[1]}, but the model "
                f"takes {part.width}; name the encoder that the model was trained with"
            )
        return tokens
    if part.name == TEXT:
        return read_embeddings(source, TEXT)[: part.length]
    found = read_optional(source, part.name)
    if found is None and part.required:
        raise InputError(
            f"{source}: has no tensor {part.name}, which the model takes too; write "
            f"[{part.length}, {part.width}] of it there"
        )
    if found is None:
        return none
    if found.ndim != 2 or found.shape[1] != part.width or len(found) > part.length:
        raise InputError(
            f"{source}: {part.name} has shape {list(found.shape)}, but the model takes up to "
            f"[{part.length}, {part.width}]; write embeddings of its own encoder"
        )
    return found


def _given(
    request: Request, model: ModelConfig, encoders: Encoders
) -> tuple[np.ndarray | None, ...]:
    """Image embeddings, given channels and first latent frame; None where there are none."""
    embeddings = None
    if request.image_embeds is not None:
        embeddings = read_embeddings(request.image_embeds, IMAGE)
        takes_given = model.given_channels and request.first is None
        refuse_others(request.image_embeds, [IMAGE, GIVEN] if takes_given else [IMAGE])
    if request.first is None:
        return embeddings, _given_in_file(request, model), None
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
        return embeddings, None, encoders.vae.encode(first[None])
    assert encoders.vae is not None
    given = encoders.vae.encode_given(first, last, request.size[0])
    if given.shape[-1] != model.given_channels:
        raise InputError(
            f"{request.first}: the VAE gives {given.shape[-1]} channels, but the model takes "
            f"{model.given_channels} beside its latents; name the VAE it was trained with"
        )
    return embeddings, given, None


def _given_in_file(request: Request, model: ModelConfig) -> np.ndarray | None:
    """Latents of the given frame and its mask, from the file of the image's embeddings.

    They are zeros without an image, as in training.

    Raises:
      InputError: the file holds none, or of another shape.
    """
    shape = (*request.grid, model.given_channels)
    if not model.given_channels:
        return None
    if request.image_embeds is None:
        return np.zeros(shape, np.float32)
    found = read_optional(request.image_embeds, GIVEN)
    if found is None or found.shape != shape:
        held = "no tensor" if found is None else f"{list(found.shape)}"
        raise InputError(
            f"{request.image_embeds}: holds {held} of the name {GIVEN}, but the model takes the "
            f"latents of the given frame and its mask, {list(shape)}; write them there"
        )
    return found
