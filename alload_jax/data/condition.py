"""Conditions of samples: classes or text embeddings, and what image-to-video models are given."""

from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import LABELS, TEXT
from alload_jax.data.sample_form import SampleForm
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig

_IMAGE_TOKENS = 257
"""Embeddings of one image by CLIP ViT-H at 224×224: 16² patches and the class token."""


@dataclass(frozen=True)
class Conditions:
    """Shape and dtype of the conditions of a micro-batch.

    Attributes:
      length: number of condition tokens per sample.
      dtype: int32 for classes, or the dtype of the embeddings.
      text_dim: width of the embeddings; None for classes.
      null_label: the null class, which stands for no condition.
      given_channels: input channels behind the noisy latents; 0 if the model takes none.
      image_shape: (tokens, width) of the image embeddings; None if the model takes none.
    """

    length: int
    dtype: np.dtype
    text_dim: int | None
    null_label: int
    given_channels: int = 0
    image_shape: tuple[int, int] | None = None

    def shape(self, rows: int, tokens: int | None = None) -> tuple[int, ...]:
        """Returns [rows, length] for classes or [rows, length, text_dim] for text.

        `tokens` replaces `length` if it is not None.
        """
        width = () if self.text_dim is None else (self.text_dim,)
        return (rows, self.length if tokens is None else tokens, *width)

    def empty(self, rows: int, tokens: int | None = None) -> np.ndarray:
        """Returns null conditions, the null class or zeros, with the shape of `shape`."""
        null = self.null_label if self.text_dim is None else 0
        return np.full(self.shape(rows, tokens), null, self.dtype)

    def given(self, *shape: int) -> jax.ShapeDtypeStruct | None:
        """Shape and dtype of given frames, [*shape, given_channels]; None if there are none."""
        if not self.given_channels:
            return None
        return jax.ShapeDtypeStruct((*shape, self.given_channels), np.float32)

    def image(self, *shape: int) -> jax.ShapeDtypeStruct | None:
        """Shape and dtype of image embeddings, [*shape, N, width]; None if there are none."""
        if self.image_shape is None:
            return None
        dtype = np.dtype(np.float32) if self.text_dim is None else self.dtype
        return jax.ShapeDtypeStruct((*shape, *self.image_shape), dtype)

    def of(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the condition of a record without padding, [L] or [L, text_dim].

        Raises:
          ValueError: a class is out of range.
        """
        if self.text_dim is not None:
            return arrays[TEXT]
        labels = arrays[LABELS]
        if labels.size and not 0 <= labels.min() <= labels.max() < self.null_label:
            raise ValueError(
                f"has labels {labels.tolist()}; they must be from 0 to below model.num_classes, "
                f"which is {self.null_label}"
            )
        return labels


def conditions_for(model: ModelConfig, manifest: Manifest) -> Conditions:
    """Returns the conditions that a model takes from the data of a manifest.

    Raises:
      InputError: the kind of condition or the width differs from the model's, or a text is too
        long.
    """
    image_shape = _image_shape(model, manifest)
    if model.text is None:
        if manifest.form.text_dim is not None:
            raise InputError(
                f"{manifest.path}: holds text embeddings of width {manifest.form.text_dim}, but "
                f"model.text is null; set model.text.dim to {manifest.form.text_dim}"
            )
        return Conditions(
            manifest.longest_text(),
            np.dtype(np.int32),
            None,
            model.num_classes,
            model.given_channels,
            image_shape,
        )
    if manifest.form.text_dim != model.text.dim:
        held = manifest.form.described()["condition"]
        raise InputError(
            f"{manifest.path}: holds {held}, but model.text.dim is {model.text.dim}; "
            "set model.text as in the data, or prepare other data"
        )
    if manifest.longest_text() > model.text.length:
        raise InputError(
            f"{manifest.path}: sample {int(manifest.text_length.argmax())} has a text of "
            f"{manifest.longest_text()} tokens, but model.text.length is {model.text.length}; "
            "shorten it, or set model.text.length to the longest"
        )
    low = model.compute_dtype == np.dtype(ml_dtypes.bfloat16)
    dtype = np.dtype(ml_dtypes.bfloat16 if low else np.float32)
    return Conditions(
        model.text.length,
        dtype,
        model.text.dim,
        model.num_classes,
        model.given_channels,
        image_shape,
    )


def form_for(model: ModelConfig) -> SampleForm:
    """The arrays beside latents that a model takes; one image is taken where any number may be."""
    image = model.image
    return SampleForm(
        model.text.dim if model.text else None,
        model.given_channels,
        (image.positions or _IMAGE_TOKENS, image.dim) if image else None,
    )


def _image_shape(model: ModelConfig, manifest: Manifest) -> tuple[int, int] | None:
    """Shape of the image embeddings that the model takes, after checking what it is given.

    Raises:
      InputError: the data lack what an image-to-video model takes.
    """
    form = manifest.form
    if model.latent_channels > model.in_channels:
        raise InputError(
            f"model.out_channels is {model.out_channels}; to train, it must be at most "
            f"model.in_channels, which is {model.in_channels}"
        )
    if model.given_channels and form.given_channels != model.given_channels:
        raise InputError(
            f"{manifest.path}: holds given frames of {form.given_channels} channels, but "
            f"model.in_channels − model.out_channels is {model.given_channels}; prepare the data "
            "with --image-to-video, or train a text-to-video model"
        )
    if model.image is None:
        return None
    shape = form.image_shape
    if shape is None or shape[1] != model.image.dim:
        raise InputError(
            f"{manifest.path}: holds image embeddings: {form.described()['image']}, but "
            f"model.image.dim is {model.image.dim}; prepare the data with --image-folder, or set "
            "model.image as in the data"
        )
    if model.image.positions not in (None, shape[0]):
        raise InputError(
            f"{manifest.path}: holds {shape[0]} image embeddings a sample, but "
            f"model.image.positions is {model.image.positions}; set it to that"
        )
    return shape
