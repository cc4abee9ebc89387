"""The Pallas kernels, lowered through Triton: forward and backward, each one pass over memory.

A program takes some columns of some tokens at a time. The backward computes the derivative from x
again, and each program adds up its part of the bias's gradient in registers and writes it once;
another kernel adds the programs' rows in a fixed order. Nothing is atomic, so that equal inputs
give equal bits.
"""

from pallas_kernels.bias_gelu.triton.implementation import TritonImplementation

__all__ = ["TritonImplementation"]
