"""What an implementation of LayerNorm-Modulate is."""

from abc import ABC, abstractmethod
from typing import Any

import jax
from jax.sharding import NamedSharding

from pallas_kernels import registry
from pallas_kernels.layernorm_modulate.operands import CallConfig, Operands


class Implementation(registry.Implementation, ABC):
    """A way to compute both functions, chosen by name.

    One with a forward and a backward of its own derives from `FusedImplementation`.
    """

    @abstractmethod
    def run(self, operands: Operands, config: CallConfig) -> tuple[jax.Array | None, jax.Array]:
        """h (None if it is no result) and the modulated value [B, S, D].

        Both are differentiable in floats.
        """

    def prepare_segments(
        self, segment_ids: jax.Array, table_rows: int, width: int, sharding: NamedSharding | None
    ) -> Any:
        """What many calls can share, derived from their segment_ids (see `segmentation`).

        Args:
          segment_ids: [B, S] int32.
          table_rows: M, rows of the tables of scale, shift and gate.
          width: D.
          sharding: of x, where tracing cannot see it.

        Returns:
          A pytree of arrays [B, ...], which calls get as `Operands.prepared`; None for nothing.
        """
        return None
