"""Names and layouts of the tensors in released checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

Naming = Literal["diffusers", "original"]
"""Naming scheme of a checkpoint: that of diffusers or of the model's original repository."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint and the parameter that it fills.

    Attributes:
      key: name in the checkpoint.
      shape: shape in the checkpoint.
      path: path of our parameter, such as `blocks/self_attention/query/kernel`.
      layer: index along the first axis of our parameter; None if layers are not stacked.
      kind: difference between the layouts: `same`; `matrix` is transposed; `patch` is a
        convolution; `leading` has a first axis of size 1.
    """

    key: str
    shape: tuple[int, ...]
    path: str
    layer: int | None
    kind: Literal["same", "matrix", "patch", "leading"]

    def to_ours(self, value: np.ndarray) -> np.ndarray:
        """Converts one layer from the checkpoint's layout to ours; a view where possible."""
        if self.kind == "matrix":
            return value.T
        if self.kind == "patch":  # a convolution with stride equal to its kernel size
            return value.transpose(2, 3, 4, 1, 0).reshape(-1, value.shape[0])
        return value[0] if self.kind == "leading" else value

    def to_theirs(self, value: np.ndarray) -> np.ndarray:
        """Inverts `to_ours`; the result is contiguous."""
        if self.kind == "matrix":
            return np.ascontiguousarray(value.T)
        if self.kind == "patch":
            width, channels, *patch = self.shape
            split = value.reshape(*patch, channels, width)
            return np.ascontiguousarray(split.transpose(4, 3, 0, 1, 2))
        return np.ascontiguousarray(value).reshape(self.shape)


def linear_tensors(
    key: str, path: str, outputs: int, inputs: int, layer: int | None = None
) -> Iterator[Tensor]:
    """Weight and bias of a linear layer, as PyTorch names them."""
    yield Tensor(f"{key}.weight", (outputs, inputs), f"{path}/kernel", layer, "matrix")
    yield Tensor(f"{key}.bias", (outputs,), f"{path}/bias", layer, "same")


def norm_tensors(key: str, path: str, size: int, layer: int | None = None) -> Iterator[Tensor]:
    """Weight and bias of an affine LayerNorm, as PyTorch names them."""
    yield Tensor(f"{key}.weight", (size,), f"{path}/scale", layer, "same")
    yield Tensor(f"{key}.bias", (size,), f"{path}/bias", layer, "same")
