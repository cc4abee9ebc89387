"""A forward and a backward kernel as one differentiable function of arrays that a mesh splits.

The custom VJP stands outside, and forward and backward each run inside a `shard_map` of their own:
under a mesh whose axes are Auto, XLA would otherwise gather every operand of a kernel that it
cannot look into. One `psum` adds the gradients of a vector over the shards that share it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.devices import mesh_axes

Options = TypeVar("Options")
Operands = TypeVar("Operands", bound=tuple[Any, ...])


@dataclass(frozen=True)
class CallConfig(Generic[Options]):
    """What is static in a call.

    Attributes:
      options: of the function; hashable.
      sharding: of x [B, S, D]; None on one device.
    """

    options: Options
    sharding: NamedSharding | None


class ShardwiseKernels(ABC, Generic[Operands, Options]):
    """Kernels of a function of tokens and vectors of parameters, on one device's arrays.

    The operands are a named tuple of x [B, S, D], the vectors, and others without a gradient. The
    default of all but x and the first vector is None.

    Attributes:
      function: its name, for messages.
      vectors: how many vectors there may be.
    """

    function: str
    vectors: ClassVar[int] = 1

    @abstractmethod
    def forward(self, operands: Operands, options: Options) -> jax.Array:
        """The output; no operand is empty."""

    @abstractmethod
    def backward(
        self, operands: Operands, cotangent: jax.Array, options: Options
    ) -> tuple[jax.Array, ...]:
        """Gradients of x, in its dtype, and of each vector that there is, float32."""

    @abstractmethod
    def specs(self, operands: Operands, config: CallConfig[Options]) -> tuple[Operands, Any]:
        """How the operands and the output are split; None where an operand is."""


def run_shardwise(
    kernels: ShardwiseKernels[Operands, Options], config: CallConfig[Options], operands: Operands
) -> jax.Array:
    """Forward and backward of the kernels under one custom VJP."""
    return _run(kernels, config, placed(kernels, config, operands))


def placed(kernels: ShardwiseKernels, config: CallConfig, operands: Any) -> Any:
    """Operands split as x is; only Explicit axes ask for it, XLA moves what Auto axes need."""
    if config.sharding is None or AxisType.Explicit not in config.sharding.mesh.axis_types:
        return operands
    mesh, specs = config.sharding.mesh, kernels.specs(operands, config)[0]
    return operands._make(
        None if value is None else jax.sharding.reshard(value, NamedSharding(mesh, spec))
        for value, spec in zip(operands, specs, strict=True)
    )


def _on_shards(config: CallConfig, run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    if config.sharding is None:
        return run
    return jax.shard_map(
        run, mesh=config.sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def differentiated_once(function: str, run: Callable) -> Callable:
    """`run`, which a custom VJP differentiates, with words for who differentiates it again.

    Each argument is guarded by itself, so that JAX still sees which of them nothing needs.
    """

    @jax.custom_jvp
    def guarded(argument: jax.Array) -> jax.Array:
        return argument

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{function}: the kernels differentiate once, in reverse mode; use "
            "implementation='xla' for second derivatives"
        )

    return lambda *arguments: run(*jax.tree.map(guarded, arguments))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(kernels: ShardwiseKernels, config: CallConfig, operands: Any) -> jax.Array:
    run = partial(kernels.forward, options=config.options)
    specs, out = kernels.specs(operands, config)
    return differentiated_once(kernels.function, _on_shards(config, run, (specs,), out))(operands)


def _forward(kernels: ShardwiseKernels, config: CallConfig, operands: Any) -> tuple[jax.Array, Any]:
    return _run(kernels, config, operands), operands


def _backward(
    kernels: ShardwiseKernels, config: CallConfig, operands: Any, cotangent: jax.Array
) -> tuple[Any]:
    dx, *found = backward_on_shards(kernels, config, kernels.backward, operands, cotangent)
    gradients = {
        operands._fields[place]: each.astype(operands[place].dtype)
        for place, each in zip(_vectors(kernels, operands), found, strict=True)
    }
    return (type(operands)(x=dx, **gradients),)


def _vectors(kernels: ShardwiseKernels, operands: Any) -> list[int]:
    """Places of the vectors that there are."""
    return [n for n in range(1, 1 + kernels.vectors) if operands[n] is not None]


def backward_on_shards(
    kernels: ShardwiseKernels,
    config: CallConfig,
    backward: Callable,
    operands: Any,
    cotangent: jax.Array,
    *others: Any,
) -> Any:
    """Runs a backward on each shard.

    Args:
      kernels: whose function it differentiates.
      config: of the call.
      backward: (operands, cotangent, options) → gradients of x and the vectors, and other arrays.
      operands: split as x is.
      cotangent: of the output.
      others: how each other array is split.

    Returns:
      As the backward, with the vectors' gradients added up over the shards that share them.
    """
    specs, out = kernels.specs(operands, config)
    of_vectors = [specs[place] for place in _vectors(kernels, operands)]
    shared = [_axes_that_share(config, each) for each in of_vectors]

    def run(operands: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        dx, *found = backward(operands, cotangent, config.options)
        for place, axes in enumerate(shared):
            found[place] = jax.lax.psum(found[place], axes) if axes else found[place]
        return dx, *found

    on_shards = _on_shards(config, run, (specs, out), (specs[0], *of_vectors, *others))
    return differentiated_once(kernels.function, on_shards)(operands, cotangent)


def _axes_that_share(config: CallConfig, of_vector: PartitionSpec) -> tuple[str, ...]:
    """Axes that split x but not a vector, whose gradients are then parts of one sum."""
    if config.sharding is None:
        return ()
    own = mesh_axes(NamedSharding(config.sharding.mesh, of_vector), 0)
    split = [name for n in range(3) for name in mesh_axes(config.sharding, n)]
    return tuple(name for name in split if name not in own)


_run.defvjp(_forward, _backward)
