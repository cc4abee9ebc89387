"""What an implementation of block-sparse attention is."""

from abc import ABC, abstractmethod

import jax

from pallas_kernels import registry
from pallas_kernels.block_sparse_attention.operands import CallConfig, Operands


class Implementation(registry.Implementation, ABC):
    """A way to compute the function, chosen by name."""

    @abstractmethod
    def run(self, operands: Operands, config: CallConfig) -> tuple[jax.Array, jax.Array]:
        """The output [R, S, H, D] and the statistics [R, H, S] (see `Residuals.lse`).

        Both are differentiable in q, k and v.
        """
