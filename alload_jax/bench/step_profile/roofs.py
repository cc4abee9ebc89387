"""Measures in a separate process how fast this device can do what a step consists of."""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from alload_jax.bench.device import copy_bandwidth, pass_times, repeated_seconds, require_gpu
from alload_jax.files import Json

_WIDTH = 8192
_SETS = 2
"""Sets of arguments in turn, so that the cache does not hold those of the next call."""


def measure(attention: Sequence[Mapping[str, int]]) -> Json:
    """Rates of matrix products and copies, and the seconds of calls of attention alone.

    Args:
      attention: the fields of `AttentionCall` of each shape but `backward`.

    Raises:
      InputError: there is no GPU.
    """
    require_gpu()
    rates: Json = {"matmul_flops_per_second": matmul_rate(_WIDTH)}
    rates["copy_bytes_per_second"] = copy_bandwidth()
    attend = partial(jax.nn.dot_product_attention, implementation="cudnn")
    alone = []
    for shape in attention:  # without what stands around it in a step
        sets = [_arguments(shape, jax.random.key(seed)) for seed in range(_SETS)]
        times = pass_times(attend, [each[:3] for each in sets], [each[3] for each in sets])
        alone.append({**shape} | {f"{part}_seconds": time.us / 1e6 for part, time in times})
    return rates | {"attention": alone}


def matmul_rate(width: int) -> float:
    """FLOP/s of bfloat16 products of random matrices [width, width]."""
    keys = jax.random.split(jax.random.key(0))
    arrays = [jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys]
    return 2.0 * width**3 / repeated_seconds(jax.jit(jnp.matmul), *arrays)


def _arguments(shape: Mapping[str, int], key: jax.Array) -> tuple[jax.Array, ...]:
    """Random queries, keys, values, and the output's cotangent: [B, S, N, H] bfloat16."""
    lengths = (shape["queries"], shape["keys"], shape["keys"], shape["queries"])
    return tuple(
        jax.random.normal(
            each, (shape["rows"], length, shape["heads"], shape["head_dim"]), "bfloat16"
        )
        for each, length in zip(jax.random.split(key, 4), lengths, strict=True)
    )
