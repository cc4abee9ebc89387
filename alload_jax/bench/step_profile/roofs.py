"""Measures in a separate process how fast this device can do what a step consists of.

`python -m alload_jax.bench.step_profile.roofs '{"attention": [...]}'` prints one line of JSON.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from alload_jax.bench.device_time import (
    copy_bandwidth,
    device_time,
    repeated_seconds,
    require_gpu,
    rotating,
)

_WIDTH = 8192
_SETS = 2
"""Sets of arguments in turn, so that the cache does not hold those of the next call."""


def measure(attention: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Rates of matrix products and copies, and the seconds of calls of attention alone.

    Args:
      attention: the fields of `AttentionCall` of each shape but `backward`.

    Raises:
      InputError: there is no GPU.
    """
    require_gpu()
    return {
        "matmul_flops_per_second": matmul_rate(_WIDTH),
        "copy_bytes_per_second": copy_bandwidth(),
        "attention": list(_attention(attention)),
    }


def matmul_rate(width: int) -> float:
    """FLOP/s of bfloat16 products of random matrices [width, width]."""
    keys = jax.random.split(jax.random.key(0))
    arrays = [jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys]
    return 2.0 * width**3 / repeated_seconds(jax.jit(jnp.matmul), *arrays)


def _attention(shapes: Sequence[Mapping[str, int]]) -> Iterator[dict[str, Any]]:
    """The shapes with `forward_seconds` and `backward_seconds`, without what stands around it."""
    for shape in shapes:
        forward, backward = _passes(shape)
        yield {**shape, "forward_seconds": forward, "backward_seconds": backward}


def _passes(shape: Mapping[str, int]) -> tuple[float, float]:
    """Seconds of cuDNN's kernels in the forward and in the backward of one call."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")

    @jax.jit
    def make(seed: jax.Array) -> list[jax.Array]:
        lengths = (shape["queries"], shape["keys"], shape["keys"], shape["queries"])
        keys = jax.random.split(jax.random.key(seed), len(lengths))
        sizes = ((shape["rows"], each, shape["heads"], shape["head_dim"]) for each in lengths)
        pairs = zip(keys, sizes, strict=True)
        return [jax.random.normal(key, size, jnp.bfloat16) for key, size in pairs]

    @jax.jit
    def linearise(*inputs: jax.Array) -> Any:
        return jax.vjp(attend, *inputs)[1]

    sets = [make(jnp.int32(seed)) for seed in range(_SETS)]
    inputs = [(*each[:3],) for each in sets]
    kept = [(linearise(*each[:3]), each[3]) for each in sets]
    return _seconds(attend, inputs), _seconds(lambda pull, dout: pull(dout), kept)


def _seconds(function: Any, sets: Sequence[tuple[Any, ...]]) -> float:
    return device_time(rotating(function, sets), sets).median / 1e6


def main() -> None:
    """Measures with the settings in the first argument, a JSON object."""
    print(json.dumps(measure(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
