"""The Pallas kernels, lowered through Mosaic GPU for Hopper: one forward, two backward.

As in the Triton kernels, a program takes a tile of queries (forward, dq) or of keys (dk and dv)
and walks through its list, and nothing is atomic. The listed tiles are copied into shared memory by
the tensor memory accelerator while tensor cores multiply those that came before.
"""

from pallas_kernels.block_sparse_attention.mosaic.implementation import MosaicImplementation

__all__ = ["MosaicImplementation"]
