"""Running a function on each device's rows and heads."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import AxisType, NamedSharding
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

    def mapped(arguments: Operands | Residuals, *cotangents: jax.Array) -> Any:
        operands = _specs(sharding, arguments.blocks)
        tokens, by_head = operands.q, operands.blocks.counts
        if kind == "forward":
            specs: Any = (operands,)
            out: Any = (tokens, by_head)
        else:
            residuals = Residuals(tokens, tokens, tokens, operands.blocks, tokens, by_head)
            specs = (residuals, tokens, by_head)
            out = operands[:3]
        each = jax.shard_map(
            run, mesh=sharding.mesh, in_specs=specs, out_specs=out, check_vma=False
        )
        return each(arguments, *cotangents)

    return mapped


def on_mesh(operands: Operands, sharding: NamedSharding | None) -> Operands:
    """The operands, split as `on_shards` takes them, where types say how they are split now."""
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return operands
    specs = _specs(sharding, operands.blocks)
    return jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec)), operands, specs
    )


def _specs(sharding: NamedSharding, blocks: BlockLists) -> Any:
    """How each operand is split: rows and heads as those of q."""
    row, _, head, _ = (*sharding.spec, None, None, None, None)[:4]
    tokens, by_head, row_only = P(row, None, head, None), P(row, head, None), P(row, None)
    make: Any = BlockLists
    indices, sizes = P(row, head, None, None), (blocks.query_block, blocks.key_block)
    lists = make(indices, by_head, row_only, row_only, *sizes)
    split: Any = Operands
    return split(tokens, tokens, tokens, lists)
