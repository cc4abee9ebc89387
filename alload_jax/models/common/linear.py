"""Linear layers whose product and bias can be computed apart."""

import jax
import jax.numpy as jnp
from flax import nnx


class Linear(nnx.Linear):
    """`nnx.Linear`, whose product alone other kernels can take."""

    def product(self, inputs: jax.Array) -> jax.Array:
        """What the layer computes of [..., in] without its bias, [..., out]."""
        x, kernel = self.promote_dtype((inputs, self.kernel[...]), dtype=self.dtype)
        return self.dot_general(
            x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=self.precision
        )

    def bias_of(self, product: jax.Array) -> jax.Array:
        """The bias [out] in the dtype of a product."""
        assert self.bias is not None
        return jnp.asarray(self.bias[...], product.dtype)
