"""A forward and a backward as one differentiable function of sharded arrays.

The custom VJP stands outside, and forward and backward each run inside a `shard_map` of their own:
under a mesh whose axes are Auto, XLA would otherwise gather every operand of a kernel that it
cannot look into. One `psum` adds the gradients of the weight over all shards.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.devices import mesh_axes, shards_of, unseen_split
from pallas_kernels.rms_norm_rotary.implementation import Implementation
from pallas_kernels.rms_norm_rotary.operands import CallConfig, Operands, Options


class FusedImplementation(Implementation):
    """An implementation with a forward and a backward of its own, each on one device's arrays."""

    @abstractmethod
    def forward(self, operands: Operands, options: Options) -> jax.Array:
        """[B, S, D // head_dim, head_dim]; no operand is empty."""

    @abstractmethod
    def backward(
        self, operands: Operands, cotangent: jax.Array, options: Options
    ) -> tuple[jax.Array, jax.Array]:
        """Gradients of x, in its dtype, and of the weight, float32."""

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Why x cannot be computed shard by shard."""
        return _unsupported_sharding(operands.x, config)

    def run(self, operands: Operands, config: CallConfig) -> jax.Array:
        """Forward and backward under one custom VJP."""
        return _fused(self, config, _placed(operands, config))


def _unsupported_sharding(x: jax.Array, config: CallConfig) -> Exception | None:
    sharding, options = config.sharding, config.options
    if sharding is None:
        return unseen_split(x)
    if (split := mesh_axes(sharding, 2)) and not options.per_head:
        return NotImplementedError(
            f"x's width is split over {', '.join(split)}, and a token's statistics need all of it; "
            "split batch or sequence, or use 'xla'"
        )
    sizes = (*x.shape[:2], x.shape[2] // options.head_dim)
    for dimension, size in enumerate(sizes):
        if size % (shards := shards_of(sharding, dimension)):
            names, what = ", ".join(mesh_axes(sharding, dimension)), f"x {x.shape}"
            return ValueError(f"{shards} shards over {names} do not divide {size} of {what}")
    return None


def _specs(operands: Operands, config: CallConfig) -> tuple[Operands, P]:
    """How the operands and the output are split."""
    spec = () if config.sharding is None else tuple(config.sharding.spec)
    batch, sequence, width, *_ = (*spec, None, None, None)
    table = None
    if operands.cos is not None:
        table = P(sequence, None) if operands.cos.ndim == 2 else P(batch, sequence, None)
    weight = P(None)
    return (
        Operands(P(batch, sequence, width), weight, table, table),  # type: ignore[arg-type]
        P(batch, sequence, width, None),
    )


def _placed(operands: Operands, config: CallConfig) -> Operands:
    """Operands split as x is; only Explicit axes ask for it, XLA moves what Auto axes need."""
    if config.sharding is None or AxisType.Explicit not in config.sharding.mesh.axis_types:
        return operands
    mesh, specs = config.sharding.mesh, _specs(operands, config)[0]
    pairs: Any = zip(operands, specs, strict=True)
    return Operands._make(
        None if value is None else jax.sharding.reshard(value, NamedSharding(mesh, spec))
        for value, spec in pairs
    )


def _on_shards(config: CallConfig, run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    if config.sharding is None:
        return run
    return jax.shard_map(
        run, mesh=config.sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _differentiated_once(run: Callable) -> Callable:
    """`run`, which the custom VJP differentiates, with words for who differentiates it again."""
    guarded = jax.custom_jvp(run)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "rms_norm_rotary: the kernels differentiate once, in reverse mode; use "
            "implementation='xla' for second derivatives"
        )

    return guarded


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    implementation: FusedImplementation, config: CallConfig, operands: Operands
) -> jax.Array:
    run = partial(implementation.forward, options=config.options)
    specs, out = _specs(operands, config)
    return _differentiated_once(_on_shards(config, run, (specs,), out))(operands)


def _forward(
    implementation: FusedImplementation, config: CallConfig, operands: Operands
) -> tuple[jax.Array, Operands]:
    return _fused(implementation, config, operands), operands


def _backward(
    implementation: FusedImplementation,
    config: CallConfig,
    operands: Operands,
    cotangent: jax.Array,
) -> tuple[Operands]:
    split = tuple(name for n in range(3) for name in mesh_axes(config.sharding, n))

    def run(operands: Operands, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx, dweight = implementation.backward(operands, cotangent, config.options)
        return dx, jax.lax.psum(dweight, split) if split else dweight

    specs, out = _specs(operands, config)
    on_shards = _on_shards(config, run, (specs, out), (specs.x, specs.weight))
    dx, dweight = _differentiated_once(on_shards)(operands, cotangent)
    # The tables get no gradient.
    return (Operands(dx, dweight.astype(operands.weight.dtype)),)


_fused.defvjp(_forward, _backward)
