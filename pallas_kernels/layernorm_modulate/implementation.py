"""What an implementation of LayerNorm-Modulate is."""

from abc import ABC, abstractmethod
from typing import Any

import jax
from jax.sharding import NamedSharding

from pallas_kernels.layernorm_modulate.operands import CallConfig, Operands


class Implementation(ABC):
    """A way to compute both functions, chosen by name.

    One with a forward and a backward of its own derives from `FusedImplementation`.

    Attributes:
      name: by which users choose it.
      interpretable: whether it runs with `interpret=True`, without the device that it is for.
    """

    name: str
    interpretable: bool = False

    @abstractmethod
    def run(self, operands: Operands, config: CallConfig) -> tuple[jax.Array | None, jax.Array]:
        """h (None without y) and the modulated value [B, S, D], differentiable in floats."""

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Why it cannot take a call, as the error to raise; None if it can.

        The error ends a sentence: NotImplementedError says what this device or sharding lacks,
        ValueError which argument to change.
        """
        return None

    def faster_than_reference(self, operands: Operands, config: CallConfig) -> bool:
        """Whether it was measured as faster than XLA's fusion for such a call."""
        return False

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
