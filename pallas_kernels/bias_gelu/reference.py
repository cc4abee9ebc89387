"""What the function means, in plain jax.numpy: the XLA implementation and the oracle's formula."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.bias_gelu.implementation import Again, Implementation
from pallas_kernels.bias_gelu.operands import CallConfig, Operands


class XlaImplementation(Implementation):
    """`reference`, fused and differentiated by XLA and JAX: for every device and sharding.

    It keeps its operands for the backward pass, and none of what is float32 inside.
    """

    name = "xla"

    def run(self, operands: Operands, config: CallConfig) -> jax.Array:
        """The reference."""
        # XLA may compute it once where it sees both passes, which a barrier would forbid.
        return jax.checkpoint(reference, prevent_cse=False)(operands)

    def backward_with_output(
        self, operands: Operands, cotangent: jax.Array, config: CallConfig
    ) -> Again:
        """By differentiating the reference, of which XLA can make one pass."""
        out, pull = jax.vjp(reference, operands)
        (gradients,) = pull(cotangent)
        return Again(out, *gradients)


def reference(operands: Operands) -> jax.Array:
    """GELU of the sum, float32 inside: z·sigmoid(√(8/π)·(z + 0.044715·z³)), in x's dtype."""
    x, bias = operands
    z = x.astype(jnp.float32) + bias.astype(jnp.float32)
    return (z * _gate(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3))).astype(x.dtype)


@jax.custom_jvp
def _gate(x: jax.Array) -> jax.Array:
    """The sigmoid. Its slope is not taken from 1 − sigmoid(x), which has few digits near 0."""
    return jax.nn.sigmoid(x)


_gate.defjvps(lambda tangent, value, x: tangent * value * _gate(-x))
