"""SiLU of x times a vector: a kernel from outside of the package, its reference and its choice."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.op import Call, Kernels, Plain, Reference, Registry, call_of


class SiluOperands(NamedTuple):
    """x: [B, S, D] floats; scale: [D] floats."""

    x: jax.Array
    scale: jax.Array


def reference(operands: SiluOperands, options: Plain) -> jax.Array:
    """silu(x·scale), float32 inside, in x's dtype."""
    del options
    z = operands.x.astype(jnp.float32) * operands.scale.astype(jnp.float32)
    return jax.nn.silu(z).astype(operands.x.dtype)


class SiluKernels(Kernels[SiluOperands, Plain]):
    """The kernels of `scaled_silu_triton`."""

    function = "scaled_silu"
    module = "scaled_silu_triton"

    def specs(self, operands: SiluOperands, call: Call[Plain]):
        batch, sequence, width = (*(call.sharding.spec if call.sharding else ()), *[None] * 3)[:3]
        return SiluOperands(P(batch, sequence, width), P(width)), P(batch, sequence, width)

    def measured(self, operands: SiluOperands, call: Call[Plain]) -> bool:
        return False

    def case(self, operands: SiluOperands, call: Call[Plain]) -> str:
        raise NotImplementedError("it is measured")

    def seconds(self, operands: SiluOperands, call: Call[Plain]) -> tuple[float, float]:
        raise NotImplementedError("it is measured")


REGISTRY: Registry = Registry(reference=Reference(reference))
REGISTRY.register(SiluKernels())


def scaled_silu(x, scale, *, implementation="auto", interpret=False, sharding=None):
    """silu(x·scale); differentiable once in both."""
    operands, call = SiluOperands(x, scale), call_of(x, Plain(interpret), sharding)
    chosen = REGISTRY.choose("scaled_silu", implementation, operands, call, interpret=interpret)
    return chosen.run(operands, call)
