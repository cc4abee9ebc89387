"""Splits a single long row into several shorter ones, for computation per token.

XLA drops the axis of a batch of one and then uses a column-major layout for matrix products and the
norms around them: on an H200 the transposes took 2 % of a block at 65,536 tokens. Split into row
blocks, a single row is computed like any other batch; the split moves no data.
"""

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding

from alload_jax.sharding.mesh import row_shards

_ROW_BLOCKS = 8


def split_single_row(
    function: Callable[..., jax.Array], sharding: NamedSharding | None, *arrays: jax.Array
) -> jax.Array:
    """Computes `function(*arrays)` with each array [B, S, ...] reshaped to [8·B, S / 8, ...].

    Arrays are reshaped only if each device has one row. The second axis of each array must be S.

    Args:
      function: maps arrays [B', S', ...] to [B', S', ...], each token independently.
      sharding: sharding of rows over a mesh; None on one device.
      arrays: [B, S, ...] with the same B and S, divisible by the mesh.
    """
    if not splits_single_row(arrays[0], sharding):
        return function(*arrays)
    rows, tokens = arrays[0].shape[:2]
    blocks = (x.reshape(rows * _ROW_BLOCKS, tokens // _ROW_BLOCKS, *x.shape[2:]) for x in arrays)
    result = function(*blocks)
    return result.reshape(rows, tokens, *result.shape[2:])


def splits_single_row(x: jax.Array, sharding: NamedSharding | None) -> bool:
    """Whether `split_single_row` reshapes arrays with the rows and tokens of x [B, S, ...]."""
    rows, tokens = x.shape[:2]
    return rows == row_shards(sharding) and tokens % _ROW_BLOCKS == 0
