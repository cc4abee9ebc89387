"""The interface of a family's architecture, from which costs are computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

LABEL_TOKENS = 1
"""Default number of condition tokens of a sample with a class."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass over one sequence of S tokens; a multiply-add counts as two.

    Attributes:
      matmul_per_token: FLOPs of matrix products per token.
      matmul_per_sequence: FLOPs of matrix products that do not depend on S, such as those on the
        tokens of the condition.
      attention_per_pair: FLOPs of attention for each of the S² pairs of tokens.
      attention_per_token: FLOPs of attention per token that do not depend on S, such as those with
        the tokens of the condition.
      attention_per_sequence: FLOPs of attention that do not depend on S.
      feed_forward_output: those of `matmul_per_token` that are the last product of feed-forward
        layers.
    """

    matmul_per_token: float
    matmul_per_sequence: float
    attention_per_pair: float
    attention_per_token: float = 0.0
    attention_per_sequence: float = 0.0
    feed_forward_output: float = 0.0

    def of(self, seq_len: int) -> float:
        """FLOPs of one sequence of `seq_len` tokens."""
        per_sequence = self.matmul_per_sequence + self.attention_per_sequence
        per_token = self.matmul_per_token + self.attention_per_token
        return per_sequence + per_token * seq_len + self.attention_per_pair * float(seq_len) ** 2


@dataclass(frozen=True)
class ActivationCounts:
    """Activations of a training step for each token of latents, in values, not bytes.

    Attributes:
      forward_traffic, backward_traffic: values read and written outside of matrix products and
        attention.
      working_set: peak of live values during the backward pass of one block.
      split_exchange: values sent between devices in one pass over a split sample.
      condition: peak of live values of each sample's condition (per sample, not per token).
      adapters: live values beside the working set where adapters are trained.
      once_traffic: of the forward traffic, what the backward pass does not repeat apart where the
        outputs of feed-forward layers are kept.
      norms_traffic: of the forward traffic, what it does not repeat where the outputs of norms are
        kept.
    """

    forward_traffic: float
    backward_traffic: float
    working_set: float
    split_exchange: float
    condition: float = 0.0
    adapters: float = 0.0
    once_traffic: float = 0.0
    norms_traffic: float = 0.0


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
        """Activations that a step moves and keeps."""
        ...

    def kept_activations(self, remat: str) -> float:
        """Values per token that all blocks keep for the backward pass, including their inputs.

        Args:
          remat: a rematerialisation policy, as `model.remat`.
        """
        ...

    def kept_condition(self, remat: str) -> float:
        """Values of each sample's condition that all blocks keep for the backward pass.

        Args:
          remat: as in `kept_activations`.
        """
        return 0.0

    def kernels(self) -> int:
        """Approximate number of kernels of a forward pass."""
        ...

    def forward_flops(self, seq_len: int) -> float:
        """FLOPs of a forward pass on one sample of `seq_len` tokens."""
        return self.flops().of(seq_len)

    def step_flops(self, seq_len: np.ndarray) -> float:
        """FLOPs of a training step on samples of these lengths: three times those of the forward.

        Recomputation by rematerialisation does not count.

        Args:
          seq_len: [N] integers.
        """
        lengths, counts = np.unique(seq_len, return_counts=True)
        each = (self.forward_flops(int(length)) for length in lengths)
        return 3.0 * sum(n * flops for n, flops in zip(counts.tolist(), each, strict=True))
