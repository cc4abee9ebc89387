"""Times RMSNorm with rotary embedding: the kernels beside XLA's fusion, by device time.

    python benchmarks/rms_norm_rotary.py

x is bfloat16, the weight and the rotary table are float32. Each shape is a call of a model: queries
of Wan 2.1 and HunyuanVideo 1.5 in self-attention, queries of cross-attention (without rotation),
keys of texts. `of_copy` is the least number of bytes of a pass, two tensors like x forward and
three backward, over its time, relative to a copy from the device to itself in the same run.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernel_passes

from alload_jax.errors import run_command
from pallas_kernels import rms_norm_rotary


class Case(NamedTuple):
    """[B, S, D], head_dim, whether each head has statistics of its own, and whether it rotates."""

    shape: tuple[int, int, int]
    head_dim: int = 128
    per_head: bool = False
    rotates: bool = True


CASES = {
    "Wan 1.3B, 480p clip": Case((1, 32760, 1536)),
    "Wan 1.3B, images": Case((42, 1560, 1536)),
    "Wan 1.3B, cross-attention": Case((42, 1560, 1536), rotates=False),
    "Wan 1.3B, one image": Case((1, 1560, 1536)),
    "Wan 1.3B, one small image": Case((1, 256, 1536)),
    "Wan 1.3B, keys of texts": Case((4, 512, 1536), rotates=False),
    "Wan 5B, 720p clip": Case((1, 27280, 3072)),
    "Wan 14B, 480p clip": Case((1, 32760, 5120)),
    "HunyuanVideo 1.5, 720p clip": Case((1, 32400, 2048), per_head=True),
    "HunyuanVideo 1.5, image": Case((1, 3600, 2048), per_head=True),
    "width 1152, heads of 64": Case((8, 4096, 1152), head_dim=64),
    "width 2304": Case((1, 32760, 2304)),
    "width 4864": Case((1, 8192, 4864)),
    "width 8192": Case((1, 8192, 8192)),
}


def arguments(case: Case, seed: int) -> tuple[jax.Array, ...]:
    """x, weight, cos, sin and the gradient of the output."""
    batch, tokens, dim = case.shape
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], case.shape, jnp.bfloat16)
    weight = 1 + 0.1 * jax.random.normal(keys[1], (case.head_dim if case.per_head else dim,))
    angle = jax.random.normal(keys[2], (tokens, case.head_dim // 2))
    heads = (batch, tokens, dim // case.head_dim, case.head_dim)
    cotangent = jax.random.normal(keys[3], heads, jnp.bfloat16)
    return x, weight, jnp.cos(angle), jnp.sin(angle), cotangent


def passes(case: Case, implementation: str) -> dict[str, Callable[..., Any]]:
    """The forward and the backward as functions of `arguments`."""

    def output(x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        rotary = (cos, sin) if case.rotates else None
        return rms_norm_rotary(
            x, weight, rotary, head_dim=case.head_dim, implementation=implementation
        )

    def backward(x: jax.Array, weight: jax.Array, *others: jax.Array) -> Any:
        *tables, cotangent = others
        return jax.vjp(lambda x, weight: output(x, weight, *tables), x, weight)[1](cotangent)

    return {"forward": lambda *given: output(*given[:4]), "backward": backward}


def main(argv: list[str]) -> int:
    """Measures and writes the result."""
    default = "rms_norm_rotary_h200.json"
    return kernel_passes.main(argv, __doc__, default, CASES, arguments, passes)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
