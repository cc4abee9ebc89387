"""What an implementation of a choice of rows is."""

from abc import ABC, abstractmethod

import jax

from pallas_kernels import registry
from pallas_kernels.row_choice.operands import Operands


class Implementation(registry.Implementation, ABC):
    """A way to compute the function, chosen by name."""

    @abstractmethod
    def run(self, operands: Operands, interpret: bool) -> jax.Array:
        """[T, D], like the parts."""
