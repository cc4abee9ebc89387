"""Segments that many calls share, prepared once."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels.layernorm_modulate.implementations import REGISTRY


@partial(
    jax.tree_util.register_dataclass, data_fields=("ids", "prepared"), meta_fields=("table_rows",)
)
@dataclass(frozen=True)
class Segmentation:
    """`segment_ids` together with what implementations derive from them for one width.

    Attributes:
      ids: [B, S] int32.
      prepared: by name of the implementation, its `prepare_segments`.
      table_rows: M.
    """

    ids: jax.Array
    prepared: dict[str, Any]
    table_rows: int


def segmentation(
    segment_ids: jax.Array, table_rows: int, width: int, sharding: NamedSharding | None = None
) -> Segmentation:
    """Prepares segment ids for many calls, such as those of a transformer's layers.

    Finding where segments end takes a dozen small kernels, which every call would otherwise start.

    Args:
      segment_ids: [B, S] signed integers, as `layernorm_modulate` takes them.
      table_rows: M, rows of the tables of scale, shift and gate.
      width: D.
      sharding: of x, if rows are split over a mesh of Auto axes.
    """
    ids = segment_ids.astype(jnp.int32)
    prepared = {
        each.name: each.prepare_segments(ids, table_rows, width, sharding) for each in REGISTRY
    }
    return Segmentation(ids, prepared, table_rows)
