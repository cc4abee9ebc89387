"""The Pallas kernels, lowered through Triton: forward and backward, each one pass over memory.

A program takes a few tokens at a time, each in tiles along the width. Channel pairs lie side by
side in one thread, so that their rotation moves no data between threads. The backward computes the
statistics again from x, which it reads anyway; each program adds up the weight's gradient in
registers and writes it once, and another kernel adds the programs' rows in a fixed order. Nothing
is atomic, so that equal inputs give equal bits.
"""

from pallas_kernels.rms_norm_rotary.triton.implementation import TritonImplementation

__all__ = ["TritonImplementation"]
