"""Block-sparse attention: each block of queries attends to the blocks of keys in its list."""

from pallas_kernels.block_sparse_attention.api import block_sparse_attention
from pallas_kernels.block_sparse_attention.block_lists import BlockLists, full_lists
from pallas_kernels.block_sparse_attention.selection import (
    BlockSegments,
    PooledScores,
    TileOrder,
    pool_blocks,
    scores_of,
    tile_order,
    top_k_blocks,
)

__all__ = [
    "BlockLists",
    "BlockSegments",
    "PooledScores",
    "TileOrder",
    "block_sparse_attention",
    "full_lists",
    "pool_blocks",
    "scores_of",
    "tile_order",
    "top_k_blocks",
]
