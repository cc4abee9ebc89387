"""What an implementation of a bias with GELU is."""

from abc import ABC, abstractmethod

import jax

from pallas_kernels import registry
from pallas_kernels.bias_gelu.operands import CallConfig, Operands


class Implementation(registry.Implementation, ABC):
    """A way to compute the function, chosen by name."""

    @abstractmethod
    def run(self, operands: Operands, config: CallConfig) -> jax.Array:
        """Like x, differentiable in x and bias."""
