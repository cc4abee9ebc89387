"""What an implementation of a bias with GELU is."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import jax

from pallas_kernels import registry
from pallas_kernels.bias_gelu.operands import CallConfig, Operands


class Again(NamedTuple):
    """What the backward pass computes where the output is not kept.

    Attributes:
      out: the output, like x.
      dx: gradient of x, in its dtype.
      dbias: gradient of the bias, in its dtype.
    """

    out: jax.Array
    dx: jax.Array
    dbias: jax.Array


class Implementation(registry.Implementation, ABC):
    """A way to compute the function, chosen by name."""

    @abstractmethod
    def run(self, operands: Operands, config: CallConfig) -> jax.Array:
        """Like x, differentiable in x and bias."""

    @abstractmethod
    def backward_with_output(
        self, operands: Operands, cotangent: jax.Array, config: CallConfig
    ) -> Again:
        """The output once more, and the gradients for its cotangent, like x."""
