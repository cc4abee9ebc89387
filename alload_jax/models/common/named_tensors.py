"""Names and layouts of the tensors of published checkpoints."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Naming = Literal["diffusers", "original"]
"""Whose names: those of diffusers, or of the model's own repository."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint and its place among our parameters.

    Attributes:
      key: its name in the checkpoint.
      shape: its shape there.
      path: of our parameter, as in `blocks/self_attention/query/kernel`.
      layer: its index along our parameter's first axis; None where layers are not stacked.
      kind: how the layouts differ.
    """

    key: str
    shape: tuple[int, ...]
    path: str
    layer: int | None
    kind: Literal["same", "matrix", "patch", "leading"]

    def to_ours(self, value: np.ndarray) -> np.ndarray:
        """The checkpoint's layout → ours, of one layer: a view where that is possible."""
        if self.kind == "matrix":
            return value.T
        if self.kind == "patch":  # a convolution whose stride is its size
            return value.transpose(2, 3, 4, 1, 0).reshape(-1, value.shape[0])
        return value[0] if self.kind == "leading" else value

    def to_theirs(self, value: np.ndarray) -> np.ndarray:
        """The inverse of `to_ours`, contiguous."""
        if self.kind == "matrix":
            return np.ascontiguousarray(value.T)
        if self.kind == "patch":
            width, channels, *patch = self.shape
            split = value.reshape(*patch, channels, width)
            return np.ascontiguousarray(split.transpose(4, 3, 0, 1, 2))
        return np.ascontiguousarray(value).reshape(self.shape)
