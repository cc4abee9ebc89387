"""Times RMSNorm with rotary embedding: the kernels beside XLA's fusion, by device time.

    python benchmarks/rms_norm_rotary.py

x is bfloat16, the weight and the rotary table are float32. Each shape is a call of a model: queries
of Wan 2.1 and HunyuanVideo 1.5 in self-attention, queries of cross-attention (without rotation),
keys of texts. `of_copy` is the least number of bytes of a pass, two tensors like x forward and
three backward, over its time, relative to a copy from the device to itself in the same run.
"""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.bench.device_time import copy_bandwidth, device_time, require_gpu, rotating
from alload_jax.bench.provenance import provenance
from alload_jax.errors import run_command
from pallas_kernels import rms_norm_rotary

ROOT = Path(__file__).parents[1]
_ROTATED_BYTES = 256 << 20
"""What the sets of arguments together exceed, if eight do: several times the L2 cache."""


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


def passes(case: Case, implementation: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The forward and the backward as functions of `arguments`."""

    def forward(x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        rotary = (cos, sin) if case.rotates else None
        return rms_norm_rotary(
            x, weight, rotary, head_dim=case.head_dim, implementation=implementation
        )

    def backward(x: jax.Array, weight: jax.Array, *others: jax.Array) -> Any:
        *tables, cotangent = others
        return jax.vjp(lambda x, weight: forward(x, weight, *tables), x, weight)[1](cotangent)

    yield "forward", lambda *given: forward(*given[:4])
    yield "backward", backward


def measure() -> dict[str, Any]:
    """Measures all cases, both passes and both implementations."""
    copy, rows = copy_bandwidth(), []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, case in CASES.items():
            size = 2 * math.prod(case.shape)
            count = min(8, max(2, math.ceil(_ROTATED_BYTES / (2 * size))))
            sets = [arguments(case, seed) for seed in range(count)]
            pending = {
                (direction, implementation): pool.submit(rotating, function, sets)
                for implementation in ("triton", "xla")
                for direction, function in passes(case, implementation)
            }
            us = {
                key: device_time(program.result(), sets, 5).median
                for key, program in pending.items()
            }
            for direction, tensors in (("forward", 2), ("backward", 3)):
                kernel, xla = us[direction, "triton"], us[direction, "xla"]
                of_copy = tensors * size / kernel * 1e6 / copy
                rows.append(
                    {"case": name, **case._asdict(), "pass": direction, "us": kernel}
                    | {"of_copy": of_copy, "xla_us": xla, "times_xla": xla / kernel}
                )
                print(f"{name}, {direction}: {kernel:.1f} µs, {of_copy:.3f} of copy, "
                      f"{xla / kernel:.2f} times XLA", flush=True)  # fmt: skip
    return {"copy_bytes_per_second": copy, "rows": rows}


def main(argv: list[str]) -> int:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "benchmarks/results/rms_norm_rotary_h200.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(argv)
    require_gpu()
    result = {
        "command": shlex.join(["python", *sys.argv]),
        **provenance(("jax", "jaxlib")),
        **measure(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
