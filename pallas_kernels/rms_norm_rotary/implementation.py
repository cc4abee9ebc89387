"""What an implementation of RMSNorm with rotary embedding is."""

from abc import ABC, abstractmethod

import jax

from pallas_kernels import registry
from pallas_kernels.rms_norm_rotary.operands import CallConfig, Operands


class Implementation(registry.Implementation, ABC):
    """A way to compute the function, chosen by name."""

    @abstractmethod
    def run(self, operands: Operands, config: CallConfig) -> jax.Array:
        """[B, S, D // head_dim, head_dim], differentiable in x and weight."""
