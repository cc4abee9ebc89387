"""Builds the condition arrays of requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.sampling.embeddings import read_embeddings
from alload_jax.sampling.encoders import Encoders
from alload_jax.sampling.flow import Condition
from alload_jax.sampling.given import as_latent, read_picture
from alload_jax.sampling.requests import Request


class RequestArrays(NamedTuple):
    """Condition and null condition of one request, each part without the batch's axis."""

    condition: Condition
    null: Condition


def arrays_of(request: Request, model: ModelConfig, encoders: Encoders) -> RequestArrays:
    """Reads or encodes what a request names, float32 or int32 in host memory.

    Raises:
      InputError: a picture cannot be read, or an encoder does not give what the model takes.
    """
    given = _given(request, model, encoders)
    if model.text is None:
        tokens = np.array(request.classes, np.int32)
        null = np.full_like(tokens, model.num_classes)
        return RequestArrays(Condition(tokens, *given), Condition(null, *given))
    text, negative = (
        _text(source, model, encoders) for source in (request.prompt, request.negative)
    )
    return RequestArrays(Condition(text, *given), Condition(negative, *given))


def stacked(arrays: Sequence[RequestArrays]) -> tuple[Condition, Condition]:
    """Condition and null condition of a batch of requests with equal `Request.shape()`."""
    return _stack([each.condition for each in arrays]), _stack([each.null for each in arrays])


def _stack(conditions: Sequence[Condition]) -> Condition:
    parts = zip(*conditions, strict=True)
    return Condition(*(None if each[0] is None else np.stack(each) for each in parts))


def _text(source: Path | str | None, model: ModelConfig, encoders: Encoders) -> np.ndarray:
    """Embeddings of a prompt or of a file, padded with zeros; all zeros for None."""
    assert model.text is not None
    padded = np.zeros((model.text.length, model.text.dim), np.float32)
    if source is not None:
        if isinstance(source, Path):
            found = read_embeddings(source, "text")
        else:
            found = encoders.encoded(source)
        padded[: len(found)] = found[: model.text.length]
    return padded


def _given(request: Request, model: ModelConfig, encoders: Encoders) -> tuple[Any, Any, Any]:
    """Image embeddings, given channels and first latent frame; None where there are none."""
    embeddings = None
    if request.image_embeds is not None:
        embeddings = read_embeddings(request.image_embeds, "image")
    if request.first is None:
        return embeddings, None, None
    first, last = (
        None if path is None else read_picture(path, *request.size[1:])
        for path in (request.first, request.last)
    )
    assert first is not None
    if encoders.image is not None:
        pictures = [first] if last is None else [first, last]
        embeddings = np.concatenate([encoders.image.encode(picture) for picture in pictures])
        _require_positions(request, model, len(embeddings))
    if not model.given_channels:
        if encoders.vae is None:
            return embeddings, None, as_latent(first, model.in_channels)
        return embeddings, None, encoders.vae.encode(first[None])
    assert encoders.vae is not None
    given = encoders.vae.encode_given(first, last, request.size[0])
    if given.shape[-1] != model.given_channels:
        raise InputError(
            f"{request.first}: the VAE gives {given.shape[-1]} channels, but the model takes "
            f"{model.given_channels} beside its latents; name the VAE it was trained with"
        )
    return embeddings, given, None


def _require_positions(request: Request, model: ModelConfig, tokens: int) -> None:
    if model.image and model.image.positions not in (None, tokens):
        raise InputError(
            f"{request.first}: gives {tokens} image embeddings, but the model takes "
            f"{model.image.positions}; it needs a first and a last frame"
        )
