"""What the function means, in plain jax.numpy."""

import jax

from pallas_kernels.bias_gelu.implementation import Again, Implementation
from pallas_kernels.bias_gelu.operands import CallConfig, Operands


class XlaImplementation(Implementation):
    """`reference`, fused and differentiated by XLA and JAX: for every device and sharding."""

    name = "xla"

    def run(self, operands: Operands, config: CallConfig) -> jax.Array:
        """The reference."""
        return reference(operands)

    def backward_with_output(
        self, operands: Operands, cotangent: jax.Array, config: CallConfig
    ) -> Again:
        """By differentiating the reference, of which XLA can make one pass."""
        out, pull = jax.vjp(reference, operands)
        (gradients,) = pull(cotangent)
        return Again(out, *gradients)


def reference(operands: Operands) -> jax.Array:
    """GELU of the sum, like x.

    In x's dtype, so that what JAX keeps for the backward pass is no wider than x. XLA's fusions
    compute in float32 all the same.
    """
    x, bias = operands
    return jax.nn.gelu(x + bias.astype(x.dtype), approximate=True)
