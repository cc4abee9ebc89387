"""Checks of requests for samples, before any weights are read."""

import math
from pathlib import Path

import numpy as np

from alload_jax.data.record import IMAGE
from alload_jax.errors import InputError
from alload_jax.models.families import family_of
from alload_jax.planning.geometry import Geometry, Triple
from alload_jax.sampling.clips import check_format
from alload_jax.sampling.embeddings import embeddings_shape
from alload_jax.sampling.requests import RawRequest, Request, Target

_FIRST_ONLY = "the model takes a first frame only; remove it"
_SEEDS = 2**32
_LARGEST = 2**31
"""Maximum size along an axis, and maximum number of elements of a sample and of its picture."""


def check_request(raw: RawRequest, target: Target) -> Request:
    """Checks that a sample can be generated and written.

    Raises:
      InputError: a value is missing or invalid.
    """
    size = (raw.get("frames"), raw.get("height"), raw.get("width"))
    for name, value in zip(("frames", "height", "width"), size, strict=True):
        _check_size(raw, name, value, target)
    if not 0 <= (seed := raw.values.get("seed", 0)) < _SEEDS:
        raise InputError(f"{raw.place('seed')} is {seed}; it must be from 0 to below 2^32")
    out = raw.get("out")
    picture_size = (size[0], size[1] * target.zoom, size[2] * target.zoom)
    check_format(raw.place("out"), out, picture_size, target.picture_channels)
    _check_given(raw, target, size)
    return Request(
        size=size,
        grid=_grid(raw, size, target),
        seed=seed,
        out=out,
        classes=_classes(raw, target),
        prompt=_text(raw, "prompt", "prompt_embeds", target),
        negative=_text(raw, "negative_prompt", "negative_embeds", target),
        image_embeds=raw.values.get("image_embeds"),
        image_tokens=_image_tokens(raw, target),
        first=raw.values.get("image"),
        last=raw.values.get("last_image"),
        frames_per_latent=target.frames_per_latent,
    )


def _check_size(raw: RawRequest, name: str, value: int, target: Target) -> None:
    """Checks that a size is a whole number of patches; the first frame has a separate latent."""
    axis = ("frames", "height", "width").index(name)
    stride, patch = target.vae_stride[axis], target.model.patch_size[axis]
    if value > _LARGEST:
        raise InputError(f"{raw.place(name)} is {value}; it must be at most {_LARGEST}")
    begin = 1 - stride if name == "frames" else 0
    step = stride * patch
    whole = (value - begin) // step
    if whole >= 1 and begin + whole * step == value:
        return
    near = [str(begin + n * step) for n in (whole, whole + 1) if n >= 1]
    raise InputError(
        f"{raw.place(name)} is {value}, which a VAE stride of {stride} and patches of {patch} "
        f"don't divide; nearest: {' and '.join(near or [str(begin + step)])}"
    )


def _grid(raw: RawRequest, size: Triple, target: Target) -> Triple:
    """Returns (frames, height, width) of the latents after checking the number of elements."""
    geometry = Geometry(target.vae_stride, target.model.patch_size)
    found = geometry.latent_grid(*(np.array([part]) for part in size))[0].tolist()
    picture_size = math.prod(size) * (target.zoom**2 * 3 if target.picture_channels else 0)
    if math.prod(found) * target.model.in_channels > _LARGEST or picture_size > _LARGEST:
        frames, height, width = size
        raise InputError(
            f"{raw.place('frames')} {frames} with height {height} and width {width} has more "
            f"than {_LARGEST} values; choose a smaller size"
        )
    return (found[0], found[1], found[2])


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


def _text(raw: RawRequest, words_key: str, key: str, target: Target) -> Path | str | None:
    """Returns words, or the file of text embeddings after checking that it fits the model."""
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
    tokens = _tokens(raw, key, "text", text.dim)
    if tokens > text.length:
        raise InputError(
            f"{raw.place(key)}: {file} has {tokens} tokens, but the model takes {text.length}; "
            "shorten it"
        )
    return file


def _image_tokens(raw: RawRequest, target: Target) -> int:
    """Returns the number of image embeddings in a file; 0 if the model or the file has none."""
    place, model = raw.place("image_embeds"), target.model
    given = "image_embeds" in raw.values
    if model.image is None:
        if given:
            raise InputError(f"{place} is given, but the model takes no image; remove it")
        return 0
    if not given:
        has_image = "image" in raw.values
        if has_image and target.encoders.image is not None:
            return 0
        if model.given_optional and not has_image:
            return 0
        raise InputError(
            f"{place} is not given; the model takes [N, {model.image.dim}] of them: give them, or "
            "--image with --image-encoder"
        )
    if "image" in raw.values and target.encoders.image is not None:
        raise InputError(f"{place} is given beside --image with --image-encoder; leave one out")
    tokens = _tokens(raw, "image_embeds", "image", model.image.dim)
    if model.image.positions not in (None, tokens):
        raise InputError(
            f"{place}: {raw.values['image_embeds']} has {tokens} tokens, but the model takes "
            f"exactly {model.image.positions}"
        )
    lengths = {part.name: part.length for part in model.condition_parts()}
    if tokens > lengths.get(IMAGE, tokens):
        raise InputError(
            f"{place}: {raw.values['image_embeds']} has {tokens} tokens, but the model takes up to "
            f"{lengths[IMAGE]}"
        )
    return tokens


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
    if model.given_channels:
        if target.encoders.vae is None:
            raise InputError(f"{place} needs --vae, a local folder of the model's VAE")
        if "last_image" in raw.values and not target.encoders.vae.takes_last_frame:
            raise InputError(f"{raw.place('last_image')}: {_FIRST_ONLY}")
        return
    if not family_of(model).has_first_frame_timestep or model.patch_size[0] != 1:
        raise InputError(f"{place} is given, but the model cannot take a first frame; remove it")
    if "last_image" in raw.values:
        raise InputError(f"{raw.place('last_image')}: {_FIRST_ONLY}")
    if target.encoders.vae is None and target.picture_channels is None:
        raise InputError(f"{place} needs --vae, a local folder of the model's VAE")
    if size[0] == 1:
        raise InputError(f"{place} is given, but --frames is 1; choose more frames")


def _tokens(raw: RawRequest, key: str, name: str, dim: int) -> int:
    """Returns the number of embeddings in a file, which is read and checked."""
    path = raw.values[key]
    shape = embeddings_shape(path, name)
    if len(shape) != 2 or shape[0] < 1 or shape[1] != dim:
        raise InputError(
            f"{raw.place(key)}: {path} holds {list(shape)}, but the model takes [tokens, {dim}]"
        )
    return shape[0]
