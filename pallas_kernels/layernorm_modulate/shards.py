"""How a call's arrays are split over a mesh, and running a function on each device's shards."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.devices import mesh_axes, shards_of, unseen_split
from pallas_kernels.layernorm_modulate.operands import CallConfig, Operands


class Specs(NamedTuple):
    """How arrays are split.

    Attributes:
      stream: x and what has its shape.
      table: scale, shift and gate.
      ids: segment_ids.
      prepared: each array of `Operands.prepared`.
      sequence_axes: names of the mesh axes that split the sequence.
    """

    stream: PartitionSpec
    table: PartitionSpec
    ids: PartitionSpec
    prepared: PartitionSpec
    sequence_axes: tuple[str, ...]


def specs_of(config: CallConfig) -> Specs:
    """How a call's arrays are split."""
    spec = () if config.sharding is None else tuple(config.sharding.spec)
    batch, sequence, *_ = (*spec, None, None)
    stream = PartitionSpec(batch, sequence, None)
    table = {
        "row": PartitionSpec(batch, None),
        "token": stream,
        "segment": PartitionSpec(batch, None, None),
    }[config.options.layout]
    axes = mesh_axes(config.sharding, 1)
    return Specs(stream, table, PartitionSpec(batch, sequence), PartitionSpec(batch), axes)


def operand_specs(config: CallConfig) -> Operands:
    """`specs_of` in the places of `Operands`."""
    specs: Any = specs_of(config)
    table = specs.table
    return Operands._make(
        (specs.stream, table, table, specs.stream, table, specs.ids, specs.prepared)
    )


def unsupported_sharding(x: jax.Array, sharding: NamedSharding | None) -> Exception | None:
    """Why x [B, S, D] cannot be computed shard by shard; None if it can."""
    if sharding is None:
        return unseen_split(x)
    if split := mesh_axes(sharding, 2):
        return NotImplementedError(
            f"x's width is split over {', '.join(split)}, and a row's statistics need all of it; "
            "split batch or sequence, or use 'xla'"
        )
    for dimension, size in enumerate(x.shape[:2]):
        shards = shards_of(sharding, dimension)
        if size % shards:
            names = ", ".join(mesh_axes(sharding, dimension))
            return ValueError(f"{shards} shards over {names} do not divide {size} of x {x.shape}")
    return None


def placed(operands: Operands, config: CallConfig) -> Operands:
    """Operands split as x is; only Explicit axes ask for it, XLA moves what Auto axes need."""
    if config.sharding is None or AxisType.Explicit not in config.sharding.mesh.axis_types:
        return operands
    mesh, specs = config.sharding.mesh, operand_specs(config)
    # Segments are prepared anew: what tracing sees of an Explicit mesh says how ids lie.
    return Operands._make(
        (
            None if value is None else jax.sharding.reshard(value, NamedSharding(mesh, spec))
            for value, spec in zip(operands._replace(prepared=None), specs, strict=True)
        )
    )


def on_shards(
    config: CallConfig, run: Callable, in_specs: Any, out_specs: Any, check: bool = False
) -> Callable:
    """`run` on each device's shards.

    Args:
      config: of the call.
      run: a function of pytrees of arrays.
      in_specs: of each argument: a spec stands for all arrays below its place, None among them.
      out_specs: of its results, likewise.
      check: whether `shard_map` checks how values vary.
    """
    sharding = config.sharding
    if sharding is None:
        return run

    def mapped(*args: Any) -> Any:
        specs = jax.tree.map(
            lambda spec, below: jax.tree.map(lambda _: spec, below),
            in_specs,
            args,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )
        return jax.shard_map(
            run, mesh=sharding.mesh, in_specs=specs, out_specs=out_specs, check_vma=check
        )(*args)

    return mapped
