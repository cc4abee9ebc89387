"""One long row as several shorter ones, for work that treats every token alike.

XLA drops the axis of a batch of one, and then lays matrix products and the norms around them out
by columns: on an H200 the transposes took 2 % of a block at 65,536 tokens. Cut in pieces, the
tokens of a lone row are computed as those of any batch; cutting moves no data.
"""

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding

from alload_jax.sharding.mesh import row_shards

_PIECES = 8


def split_single_row(
    function: Callable[..., jax.Array], sharding: NamedSharding | None, *arrays: jax.Array
) -> jax.Array:
    """`function(*arrays)`, each array [B, S, ...] cut to [8·B, S / 8, ...] where that helps.

    It helps where each device has one row. An array whose second axis is not S must not be given.

    Args:
      function: of arrays [B', S', ...], token by token, giving [B', S', ...].
      sharding: how rows are split over a mesh; None on one device.
      arrays: [B, S, ...], with the same B and S, which the mesh divides.
    """
    rows, tokens = arrays[0].shape[:2]
    if rows != row_shards(sharding) or tokens % _PIECES:
        return function(*arrays)
    cut = (x.reshape(rows * _PIECES, tokens // _PIECES, *x.shape[2:]) for x in arrays)
    result = function(*cut)
    return result.reshape(rows, tokens, *result.shape[2:])
