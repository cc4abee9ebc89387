"""What an implementation of block-sparse attention is."""

from abc import ABC, abstractmethod

import jax

from pallas_kernels.block_sparse_attention.operands import CallConfig, Operands


class Implementation(ABC):
    """A way to compute the function, chosen by name.

    Attributes:
      name: by which users choose it.
      interpretable: whether it runs with `interpret=True`, without the device that it is for.
    """

    name: str
    interpretable: bool = False

    @abstractmethod
    def run(self, operands: Operands, config: CallConfig) -> tuple[jax.Array, jax.Array]:
        """The output [R, S, H, D] and the statistics [R, H, S] (see `Residuals.lse`).

        Both are differentiable in q, k and v.
        """

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Why it cannot take a call, as the error to raise; None if it can.

        The error ends a sentence: NotImplementedError says what this device or sharding lacks,
        ValueError which argument to change.
        """
        return None

    def faster_than_reference(self, operands: Operands, config: CallConfig) -> bool:
        """Whether it is faster than the reference for such a call."""
        return False
