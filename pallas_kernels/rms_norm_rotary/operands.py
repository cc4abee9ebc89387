"""The operands of RMSNorm with rotary embedding, and the checks that bring them into one form."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import shardwise

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_NAME = "rms_norm_rotary"


class Operands(NamedTuple):
    """Arrays of one call.

    Attributes:
      x: [B, S, D] bfloat16, float16 or float32.
      weight: [D], or [head_dim] where each head has statistics of its own.
      bias: [D], which x holds already and which gets the sum of x's gradients; None for none.
      cos: [S, head_dim // 2] or [B, S, head_dim // 2] float32; None for no rotation.
      sin: like `cos`.
    """

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None


@dataclass(frozen=True)
class Options:
    """What is static in a call on one device.

    Attributes:
      head_dim: channels of a head.
      per_head: whether each head has statistics of its own, rather than the whole width.
      eps: added to the mean square.
      interpret: run kernels in an interpreter, which needs no GPU.
    """

    head_dim: int
    per_head: bool
    eps: float
    interpret: bool = False


CallConfig = shardwise.CallConfig[Options]
"""What is static in a call."""


def normalise(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    rotary: tuple[jax.Array, ...] | None,
    head_dim: int,
    eps: float,
    interpret: bool,
) -> tuple[Operands, Options]:
    """Checks what a user gave and brings it into the form of `Operands`.

    Raises:
      TypeError: head_dim or eps is no plain number.
      ValueError: a shape, a dtype or eps does not fit.
    """
    if x.ndim != 3 or x.dtype not in DTYPES:
        raise ValueError(
            f"{_NAME}: x is {x.dtype}{list(x.shape)}; it must be [B, S, D] of bfloat16, float16 or "
            "float32"
        )
    dim = x.shape[-1]
    if type(head_dim) is not int or type(eps) is not float:
        raise TypeError(
            f"{_NAME}: head_dim is {head_dim!r} and eps {eps!r}; they must be an int and a float"
        )
    if not np.float32(eps) > 0:
        raise ValueError(f"{_NAME}: eps={eps} is not above 0 in float32")
    if head_dim < 1 or dim % head_dim:
        raise ValueError(f"{_NAME}: head_dim={head_dim} does not divide D={dim}, the width of x")
    if weight.shape not in ((dim,), (head_dim,)) or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"{_NAME}: weight is {weight.dtype}{list(weight.shape)}; it must be floats [{dim}], or "
            f"[{head_dim}] for statistics of each head"
        )
    if bias is not None and (bias.shape != (dim,) or not jnp.issubdtype(bias.dtype, jnp.floating)):
        raise ValueError(
            f"{_NAME}: bias is {bias.dtype}{list(bias.shape)}; it must be floats [{dim}]"
        )
    options = Options(head_dim, weight.shape != (dim,), eps, interpret)
    if rotary is None:
        return Operands(x, weight, bias), options
    if head_dim % 2:
        raise ValueError(f"{_NAME}: head_dim={head_dim} is odd; channels rotate in pairs")
    shared = (x.shape[1], head_dim // 2)
    shapes = [jnp.shape(part) for part in rotary]
    if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0] not in (shared, (len(x), *shared)):
        raise ValueError(
            f"{_NAME}: rotary has the shapes {[list(shape) for shape in shapes]}; it must be cos "
            f"and sin of {list(shared)}, or of {[len(x), *shared]}"
        )
    # No implementation has a gradient for them, so that none depends on the choice.
    cos, sin = (jax.lax.stop_gradient(jnp.asarray(part, jnp.float32)) for part in rotary)
    return Operands(x, weight, bias, cos, sin), options


def heads_shape(x: jax.Array, options: Options) -> tuple[int, ...]:
    """[B, S, D // head_dim, head_dim]."""
    return (*x.shape[:-1], x.shape[-1] // options.head_dim, options.head_dim)


def rows_of(x: jax.Array) -> int:
    """Tokens of x [B, S, D]."""
    return math.prod(x.shape[:-1])
