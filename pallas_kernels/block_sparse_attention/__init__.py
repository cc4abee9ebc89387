"""Block-sparse attention: each block of queries attends to the blocks of keys in its list."""

from pallas_kernels.block_sparse_attention.api import block_sparse_attention
from pallas_kernels.block_sparse_attention.block_lists import BlockLists, full_lists

__all__ = ["BlockLists", "block_sparse_attention", "full_lists"]
