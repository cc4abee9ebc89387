"""The Pallas kernels, lowered through Triton: one forward, two backward.

A program takes a tile of queries (forward, dq) or of keys (dk and dv) and walks through its list,
so that each result is summed up by one program in a fixed order: nothing is atomic, and equal
inputs give equal bits. dk and dv need the inverted lists, which XLA sorts. Programs take the
longest lists of a head first, and heads one after another, so that a head's keys stay in L2.
"""

from pallas_kernels.block_sparse_attention.triton.implementation import TritonImplementation

__all__ = ["TritonImplementation"]
