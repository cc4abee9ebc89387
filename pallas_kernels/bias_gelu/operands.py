"""The operands of a bias with GELU, and their checks."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import shardwise

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_NAME = "bias_gelu"


class Operands(NamedTuple):
    """Arrays of one call.

    Attributes:
      x: [B, S, D] bfloat16, float16 or float32.
      bias: [D] floats.
    """

    x: jax.Array
    bias: jax.Array


@dataclass(frozen=True)
class Options:
    """What is static in a call on one device.

    Attributes:
      interpret: run kernels in an interpreter, which needs no GPU.
    """

    interpret: bool = False


CallConfig = shardwise.CallConfig[Options]
"""What is static in a call."""


def check(operands: Operands) -> None:
    """Checks what a user gave.

    Raises:
      ValueError: a shape or a dtype does not fit.
    """
    x, bias = operands
    if x.ndim != 3 or x.dtype not in DTYPES:
        raise ValueError(
            f"{_NAME}: x is {x.dtype}{list(x.shape)}; it must be [B, S, D] of bfloat16, float16 or "
            "float32"
        )
    if bias.shape != x.shape[-1:] or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(
            f"{_NAME}: bias is {bias.dtype}{list(bias.shape)}; it must be floats [{x.shape[-1]}]"
        )
