"""The Pallas kernels, lowered through Triton: forward and backward, each one pass over memory.

A program takes a piece: consecutive rows that share one row of scale, shift and gate. It holds
that row in registers and walks through its piece, asking memory for the next row before it works
on this one. In the backward it adds up the gradients of scale, shift and gate in float32
registers, tile by tile along the width (AdaptiveLoad's D-tile coalesced reduction, arXiv
2605.17923, taken to one pass), and writes them once; `reduction.py` adds the programs'
partial rows in a fixed order. Nothing is atomic, so that equal inputs give equal bits.

The backward takes mean and 1/deviation of each row from the forward, eight bytes a row: on an
H200 that was faster than taking them from the row again.
"""

from pallas_kernels.layernorm_modulate.triton.calls import (
    BACKWARD,
    FORWARD,
    STATISTICS,
    SUM_BACKWARD,
    backward,
    forward,
)
from pallas_kernels.layernorm_modulate.triton.reduction import REDUCE

__all__ = [
    "BACKWARD",
    "FORWARD",
    "REDUCE",
    "STATISTICS",
    "SUM_BACKWARD",
    "backward",
    "forward",
]
