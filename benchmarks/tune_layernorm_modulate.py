"""Measures which blocks suit the LayerNorm-Modulate kernels, width by width, on this GPU.

    python benchmarks/tune_layernorm_modulate.py --out tuned.json

What it finds goes into pallas_kernels/layernorm_modulate/triton/tuning.py by hand.
"""

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from alload_jax.bench.device_time import device_time, require_gpu, rotating
from pallas_kernels.layernorm_modulate.operands import Operands, Options, Residuals, normalise
from pallas_kernels.layernorm_modulate.triton import calls
from pallas_kernels.layernorm_modulate.triton.tuning import Blocks, Pass, blocks_for
from pallas_kernels.layernorm_modulate.workloads import WORKLOADS

ELEMENTS = 50_000_000
DIMS = (1536, 5120, 1152, 3072, 2048, 4096, 8192, 1024, 512, 256)
PER_CORE = {
    "forward": {1: (8, 16, 24, 32), 2: (8, 16), 4: (4, 8, 16, 24), 8: (2, 4, 8)},
    "backward": {1: (4, 8, 12, 16), 2: (4, 6, 8), 4: (2, 3, 4), 8: (1, 2)},
}


def candidates(kernel: Pass, dim: int, cores: int) -> Iterator[Blocks]:
    """Blocks for rows of `dim` elements, but those that cannot be fast."""
    backward = kernel.endswith("backward")
    for warps, lanes in itertools.product((1, 2, 4, 8), (4, 8)):
        tile, each = 32 * warps * lanes, dim / (32 * warps)
        if tile // 2 >= dim or not 2 <= each <= 96:
            continue
        for per_core in PER_CORE["backward" if backward else "forward"][warps]:
            for prefetch, keep in itertools.product((True, False), (True, False)):
                if (keep or (backward and each >= 20)) and (prefetch or each >= 20):
                    yield Blocks(tile, warps, per_core * cores, prefetch, keep)


def make_calls(kernel: Pass, dim: int, count: int) -> tuple[Any, list[tuple[Any, ...]]]:
    """A function of (blocks) → call, and sets of its arguments."""
    named = [workload.shape for workload in WORKLOADS.values() if workload.dim == dim]
    batch, seq_len, _ = named[0] if named else (1, ELEMENTS // dim, dim)
    residual = kernel.startswith("residual")

    def make(key: jax.Array) -> tuple[Operands, jax.Array, jax.Array]:
        keys = jax.random.split(key, 7)
        wide = (jax.random.normal(k, (batch, seq_len, dim), jnp.bfloat16) for k in keys[:4])
        x, y, dh, dout = wide
        scale, shift, gate = (jax.random.normal(k, (batch, dim)) for k in keys[4:])
        more = (y, gate) if residual else (None, None)
        return Operands(x, scale, shift, *more), dh, dout

    made = [jax.jit(make)(jax.random.key(n)) for n in range(count)]
    _, options = normalise(kernel, made[0][0], eps=1e-6, residual_dtype=None, segment_block=None)
    outputs = ("out", "statistics", *(["h"] if residual else []))
    if kernel.endswith("forward"):
        sets: list[tuple[Any, ...]] = [(operands,) for operands, _, _ in made]
        return lambda blocks: lambda o: calls.forward(o, options, blocks, outputs), sets
    sets = [
        (_residuals(operands, options), dh if residual else None, dout)
        for operands, dh, dout in made
    ]
    return lambda blocks: lambda s, dh, dout: calls.backward(s, dh, dout, options, blocks), sets


def _residuals(operands: Operands, options: Options) -> Residuals:
    """As if x were the norm's input: the time does not depend on the values."""
    (statistics,) = calls.forward(operands, options, blocks_for("forward", 1536), ["statistics"])
    shift = jnp.zeros((0,))
    return Residuals(operands.x, statistics, operands.scale, shift, operands.y, operands.gate, None)


def tune(kernel: Pass, dim: int, pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """Every candidate's time, best first."""
    call, sets = make_calls(kernel, dim, 2)
    ways = list(candidates(kernel, dim, jax.devices()[0].core_count))
    programs = pool.map(lambda blocks: rotating(call(blocks), sets), ways)
    timed = [
        {
            "kernel": kernel,
            "dim": dim,
            "us": round(device_time(program, sets, iterations=4).median, 2),
            **dataclasses.asdict(blocks),
        }
        for blocks, program in zip(ways, programs, strict=True)
    ]
    return sorted(timed, key=lambda entry: entry["us"])


def main() -> None:
    """Tunes all passes and widths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="tuned.json")
    parser.add_argument("--dims", type=int, nargs="*", default=DIMS)
    parser.add_argument("--kernels", nargs="*", default=get_args(Pass))
    options = parser.parse_args()
    require_gpu()
    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for dim, kernel in itertools.product(options.dims, options.kernels):
            entries = tune(kernel, dim, pool)
            found += entries
            for entry in entries[:3]:
                print(*entry.values(), flush=True)
            Path(options.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
