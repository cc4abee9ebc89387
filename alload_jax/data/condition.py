"""Conditions of samples: classes or precomputed text embeddings."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import LABELS, TEXT
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig


@dataclass(frozen=True)
class Conditions:
    """Shape and dtype of the conditions of a micro-batch.

    Attributes:
      length: number of condition tokens per sample.
      dtype: int32 for classes, or the dtype of the embeddings.
      text_dim: width of the embeddings; None for classes.
      null_label: the null class, which stands for no condition.
    """

    length: int
    dtype: np.dtype
    text_dim: int | None
    null_label: int

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
      NotImplementedError: the model needs conditions that data folders do not support.
    """
    if model.image or model.latent_channels != model.in_channels:
        raise NotImplementedError(
            f"model.image {model.image} and model.out_channels {model.out_channels}: "
            "image-to-video models can be loaded and run, but data folders do not support the "
            "conditioning frames to train them; train a text-to-video model"
        )
    if model.text is None:
        if manifest.text_dim is not None:
            raise InputError(
                f"{manifest.path}: holds text embeddings of width {manifest.text_dim}, but "
                f"model.text is null; set model.text.dim to {manifest.text_dim}"
            )
        return Conditions(manifest.longest_text(), np.dtype(np.int32), None, model.num_classes)
    if manifest.text_dim != model.text.dim:
        held = "classes" if manifest.text_dim is None else f"text of width {manifest.text_dim}"
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
    return Conditions(model.text.length, dtype, model.text.dim, model.num_classes)
