"""What a family of models says of itself, as far as costs need it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

LABEL_TOKENS = 1
"""Condition tokens of a sample with a class, where nothing else is said."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass over one sequence of S tokens; a multiply-add counts as two.

    Attributes:
      matmul_per_token: of matrix products, for each of the S tokens.
      matmul_per_sequence: of matrix products whatever S is, such as on the tokens of its condition.
      attention_per_pair: of attention, for each of the S² pairs of tokens.
      attention_per_token: of attention between the S tokens and those of the condition, for each
        of the S.
      attention_per_sequence: of attention whatever S is.
    """

    matmul_per_token: float
    matmul_per_sequence: float
    attention_per_pair: float
    attention_per_token: float = 0.0
    attention_per_sequence: float = 0.0

    def of(self, seq_len: int) -> float:
        """FLOPs of one sequence of `seq_len` tokens."""
        per_sequence = self.matmul_per_sequence + self.attention_per_sequence
        per_token = self.matmul_per_token + self.attention_per_token
        return per_sequence + per_token * seq_len + self.attention_per_pair * float(seq_len) ** 2


@dataclass(frozen=True)
class ActivationCounts:
    """Activations of a training step for each token of latents, in values, not bytes.

    Attributes:
      forward_traffic, backward_traffic: read and written beside matrix products and attention.
      working_set: alive at most while one block goes backward.
      split_exchange: sent between devices, of each direction of one pass over a split sample.
    """

    forward_traffic: float
    backward_traffic: float
    working_set: float
    split_exchange: float


class Architecture(Protocol):
    """The shape of a model. A frozen dataclass that names this class as its base."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The architecture that fields describe, as `fields` gives them.

        Raises:
          InputError: a field is missing or wrong, or the model has no cost model.
        """
        ...

    def fields(self) -> dict[str, Any]:
        """The architecture as JSON values; `family` names it, except for Wan's."""
        ...

    def parameters(self) -> int:
        """Parameters of the model, exactly."""
        ...

    def flops(self) -> ForwardFlops:
        """FLOPs of a forward pass."""
        ...

    def activations(self) -> ActivationCounts:
        """What a step moves and holds."""
        ...

    def kept_activations(self, remat: str) -> float:
        """Values for each token that all blocks keep for the backward pass, inputs among them.

        Args:
          remat: a rematerialisation policy, as `model.remat`.
        """
        ...

    def kernels(self) -> int:
        """Kernels of a forward pass, about."""
        ...

    def forward_flops(self, seq_len: int) -> float:
        """FLOPs of a forward pass on one sample of `seq_len` tokens."""
        return self.flops().of(seq_len)

    def step_flops(self, seq_len: np.ndarray) -> float:
        """FLOPs of a training step on samples of these lengths: three times their forward's.

        What rematerialisation computes again does not count.

        Args:
          seq_len: [N] integers.
        """
        lengths, counts = np.unique(seq_len, return_counts=True)
        each = (self.forward_flops(int(length)) for length in lengths)
        return 3.0 * sum(n * flops for n, flops in zip(counts.tolist(), each, strict=True))
