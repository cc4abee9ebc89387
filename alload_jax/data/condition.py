"""What a sample is drawn from: classes, or text embeddings that were computed beforehand."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import LABELS, TEXT
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig


@dataclass(frozen=True)
class Conditions:
    """The array of conditions of a micro-batch.

    Attributes:
      length: condition tokens of every row.
      dtype: int32 classes, or the embeddings' dtype.
      text_dim: width of the embeddings; None for classes.
      null_label: the class that stands for none.
    """

    length: int
    dtype: np.dtype
    text_dim: int | None
    null_label: int

    def shape(self, rows: int, tokens: int | None = None) -> tuple[int, ...]:
        """[rows, length] for classes, [rows, length, text_dim] for text; `tokens` for length."""
        width = () if self.text_dim is None else (self.text_dim,)
        return (rows, self.length if tokens is None else tokens, *width)

    def empty(self, rows: int, tokens: int | None = None) -> np.ndarray:
        """Rows without a condition, no class or zeros, shaped as `shape` says."""
        null = self.null_label if self.text_dim is None else 0
        return np.full(self.shape(rows, tokens), null, self.dtype)

    def of(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """A record's own condition, not yet filled up: [L] or [L, text_dim].

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
    """How a model takes the conditions of these data.

    Raises:
      InputError: the data hold another kind of condition, other widths, or too long a text.
      NotImplementedError: the model wants more than data folders hold.
    """
    if model.image or model.latent_channels != model.in_channels:
        raise NotImplementedError(
            f"model.image {model.image} and model.out_channels {model.out_channels}: "
            "image-to-video models can be loaded and run, but data folders hold no conditioning "
            "frames to train them on; train a text-to-video model"
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
            "set model.text to the data's, or prepare other data"
        )
    if manifest.longest_text() > model.text.length:
        raise InputError(
            f"{manifest.path}: sample {int(manifest.text_length.argmax())} has a text of "
            f"{manifest.longest_text()} tokens, but model.text.length is {model.text.length}; "
            "cut it, or set the length to the longest"
        )
    low = model.compute_dtype == np.dtype(ml_dtypes.bfloat16)
    dtype = np.dtype(ml_dtypes.bfloat16 if low else np.float32)
    return Conditions(model.text.length, dtype, model.text.dim, model.num_classes)
