"""Times a bias with GELU: the kernels beside XLA's fusion, by device time.

    python benchmarks/bias_gelu.py

x and the bias are bfloat16, as between the products of a feed-forward layer. `of_copy` is the least
number of bytes of a pass, two tensors like x forward and three backward, over its time, relative to
a copy from the device to itself in the same run. The backward holds the gradient of the bias.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernel_passes

from alload_jax.errors import run_command
from pallas_kernels import bias_gelu


class Case(NamedTuple):
    """[B, S, D]."""

    shape: tuple[int, int, int]


CASES = {
    "Wan 1.3B, 480p clip": Case((1, 32760, 8960)),
    "Wan 1.3B, images": Case((42, 1560, 8960)),
    "Wan 1.3B, one image": Case((1, 1560, 8960)),
    "Wan 1.3B, one small image": Case((1, 256, 8960)),
    "Wan 5B, 720p clip": Case((1, 27280, 14336)),
    "Wan 14B, 480p clip": Case((1, 32760, 13824)),
    "HunyuanVideo 1.5, 720p clip": Case((1, 32400, 8192)),
    "HunyuanVideo 1.5, texts": Case((1, 1985, 8192)),
    "width 1024": Case((8, 4096, 1024)),
    "width 1152": Case((8, 4096, 1152)),
    "width 1536": Case((8, 4096, 1536)),
    "width 4608": Case((8, 4096, 4608)),
    "width 5000": Case((8, 4096, 5000)),
    "width 6144": Case((8, 4096, 6144)),
    "width 20480": Case((4, 4096, 20480)),
}


def arguments(case: Case, seed: int) -> tuple[jax.Array, ...]:
    """x, bias and the gradient of the output."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (case.shape, case.shape[-1:], case.shape)
    draws = zip(keys, shapes, strict=True)
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in draws)


def passes(case: Case, implementation: str) -> dict[str, Callable[..., Any]]:
    """The forward and the backward as functions of `arguments`."""

    def output(x: jax.Array, bias: jax.Array) -> jax.Array:
        return bias_gelu(x, bias, implementation=implementation)

    def backward(x: jax.Array, bias: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(output, x, bias)[1](cotangent)

    return {"forward": lambda x, bias, _: output(x, bias), "backward": backward}


def main(argv: list[str]) -> int:
    """Measures and writes the result."""
    return kernel_passes.main(argv, __doc__, "bias_gelu_h200.json", CASES, arguments, passes)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
