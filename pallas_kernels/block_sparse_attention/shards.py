"""Running a function on each device's rows and heads."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import devices
from pallas_kernels.block_sparse_attention.block_lists import BlockLists
from pallas_kernels.block_sparse_attention.operands import Operands, Residuals


def unsupported_sharding(q: jax.Array, sharding: NamedSharding | None) -> Exception | None:
    """Why q [R, S, H, D] cannot be computed shard by shard; None if it can."""
    if sharding is None:
        if hidden := devices.hidden_axes(q):
            return ValueError(
                f"tracing cannot see how q is split over the Auto axes {hidden} of the mesh; "
                "give sharding=NamedSharding(mesh, P(row axes, None, head axes, None))"
            )
        return None
    for dimension, what in ((1, "tokens"), (3, "width")):
        if split := devices.mesh_axes(sharding, dimension):
            return NotImplementedError(
                f"q's {what} are split over {', '.join(split)}; split rows or heads"
            )
    for dimension in (0, 2):
        shards = devices.shards_of(sharding, dimension)
        if q.shape[dimension] % shards:
            names = ", ".join(devices.mesh_axes(sharding, dimension))
            return ValueError(
                f"{shards} shards over {names} do not divide {q.shape[dimension]} of q {q.shape}"
            )
    return None


def on_shards(
    sharding: NamedSharding | None, run: Callable, kind: Literal["forward", "backward"]
) -> Callable:
    """`calls.forward` or `calls.backward` on each device's rows and heads; nothing is sent."""
    if sharding is None:
        return run
    spec = (*sharding.spec, None, None, None)
    row, head = spec[0], spec[2]
    tokens, by_head, row_only = P(row, None, head, None), P(row, head, None), P(row, None)

    def of_lists(blocks: BlockLists) -> Any:
        return BlockLists(
            P(row, head, None, None),  # type: ignore[arg-type]
            by_head,  # type: ignore[arg-type]
            row_only,  # type: ignore[arg-type]
            row_only,  # type: ignore[arg-type]
            blocks.query_block,
            blocks.key_block,
        )

    def mapped(arguments: Operands | Residuals, *cotangents: jax.Array) -> Any:
        lists = of_lists(arguments.blocks)
        three = (tokens, tokens, tokens)
        if kind == "forward":
            specs: Any = (Operands(*three, lists),)  # type: ignore[arg-type]
            out: Any = (tokens, by_head)
        else:
            specs = (Residuals(*three, lists, tokens, by_head), tokens, by_head)  # type: ignore[arg-type]
            out = three
        each = jax.shard_map(
            run, mesh=sharding.mesh, in_specs=specs, out_specs=out, check_vma=False
        )
        return each(arguments, *cotangents)

    return mapped
