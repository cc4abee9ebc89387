"""Architectures that are a stack of equal blocks, and pieces that they share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from alload_jax.errors import InputError
from alload_jax.planning.architectures.architecture import ActivationCounts, Architecture

Tensors = tuple[int, int]
"""Numbers of tensors of S × dim and of S × ffn_dim."""


@dataclass(frozen=True)
class BlockTensors:
    """What a block reads, writes and keeps for each token of S, in tensors.

    Attributes:
      kernels: kernels of a block's forward pass.
      forward_traffic, backward_traffic: read and written outside matrix products and attention.
      once_traffic: of the forward's, what is not repeated apart where the outputs of feed-forward
        layers are kept.
      norms_traffic: of the forward's, what is not repeated where the outputs of norms are kept.
      working_set: peak of live ones in the backward pass of one block.
      adapters: live ones beside it where adapters are trained.
      kept: by rematerialisation policy, those that every block keeps, including its input.
      exchanged: sent between devices in one pass over a split sample.
    """

    kernels: int
    forward_traffic: Tensors
    backward_traffic: Tensors
    once_traffic: Tensors
    norms_traffic: Tensors
    working_set: Tensors
    adapters: Tensors
    kept: Mapping[str, Tensors]
    exchanged: Tensors


@dataclass(frozen=True)
class BlockArchitecture(Architecture):
    """A transformer of equal blocks. A family's architecture adds its fields and its own counts.

    Attributes:
      dim: width of the residual stream, or of each of several.
      ffn_dim: width of the feed-forward layers.
      num_heads: attention heads.
      num_layers: transformer blocks.
      tensors: counts of a block.
    """

    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int

    tensors: ClassVar[BlockTensors]

    def condition_values(self) -> float:
        """Peak of live values of each sample's condition."""
        raise NotImplementedError

    def activations(self) -> ActivationCounts:
        """See `Architecture.activations`."""
        tensors, layers = self.tensors, self.num_layers
        return ActivationCounts(
            forward_traffic=layers * self._values(tensors.forward_traffic),
            backward_traffic=layers * self._values(tensors.backward_traffic),
            once_traffic=layers * self._values(tensors.once_traffic),
            norms_traffic=layers * self._values(tensors.norms_traffic),
            working_set=self._values(tensors.working_set),
            split_exchange=layers * self._values(tensors.exchanged),
            adapters=self._values(tensors.adapters),
            condition=self.condition_values(),
        )

    def kept_activations(self, remat: str) -> float:
        """See `Architecture.kept_activations`."""
        return self.num_layers * self._values(self.tensors.kept[remat])

    def kernels(self) -> int:
        """See `Architecture.kernels`."""
        return self.num_layers * self.tensors.kernels

    def _values(self, tensors: Tensors) -> int:
        """Values per token of so many tensors."""
        narrow, wide = tensors
        return narrow * self.dim + wide * self.ffn_dim


def require_whole_numbers(fields: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Checks that the fields of these names are whole numbers above 0.

    Raises:
      InputError: one is not.
    """
    for name in names:
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"model.{name} is {value!r}; give a whole number of at least 1")


def linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer with biases."""
    return (inputs + 1) * outputs
