"""The Pallas kernels, lowered through Triton: forward and backward, each one pass over memory.

A program takes a block of rows: consecutive rows that share one row of scale, shift and gate. It
keeps that row in registers and walks through its rows, loading each before it works on the one
before. In the backward it adds up the gradients of scale, shift and gate in float32 registers, tile
by tile along the width (AdaptiveLoad's kernel, arXiv 2605.17923, has a D-tile coalesced reduction),
and writes them once; `pallas_kernels/triton/reduction.py` adds the programs' partial rows in a
fixed order.
Nothing is atomic, so that equal inputs give equal bits.

The backward takes mean and 1/deviation of each row from the forward, eight bytes a row: on an
H200 that was faster than computing them again.
"""

from pallas_kernels.layernorm_modulate.triton.implementation import TritonImplementation

__all__ = ["TritonImplementation"]
