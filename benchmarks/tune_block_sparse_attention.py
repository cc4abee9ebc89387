"""Measures which tiles suit the kernels of block-sparse attention on this GPU.

    python benchmarks/tune_block_sparse_attention.py --out tuned.json

What it finds goes by hand into the files tuning.py of the implementations, mosaic and triton.
"""

import argparse
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from alload_jax.bench.device_time import device_time, require_gpu, rotating
from alload_jax.bench.provenance import provenance
from alload_jax.bench.sparse_attention import KERNELS, Arguments, Shape, make_arguments, make_lists
from alload_jax.errors import run_command
from pallas_kernels.block_sparse_attention import BlockLists
from pallas_kernels.block_sparse_attention.block_lists import invert
from pallas_kernels.block_sparse_attention.differentiable import Cotangents
from pallas_kernels.block_sparse_attention.mosaic import tuning as mosaic_tuning
from pallas_kernels.block_sparse_attention.operands import Operands, Options, Residuals
from pallas_kernels.block_sparse_attention.triton import tuning as triton_tuning
from pallas_kernels.block_sparse_attention.triton.tuning import Pass

Tiles = mosaic_tuning.Tiles | triton_tuning.Tiles


def mosaic_candidates(block: int) -> Iterator[Tiles]:
    """Tiles within blocks of this size, and up to two or three of each in shared memory."""
    sizes = [size for size in (64, 128) if size <= block]
    for own, listed in itertools.product(sizes, sizes):
        most = 3 if own == listed == 64 else 2
        counts = range(1, most + 1)
        for first, second in itertools.product(counts, counts):
            yield mosaic_tuning.Tiles(own, listed, (first, second))


def triton_candidates(kernel: Pass, block: int) -> Iterator[Tiles]:
    """Tiles for blocks of this size: a program's own within a block, those it walks up to two."""
    own = [size for size in (64, 128) if size <= block]
    walked = [size for size in (32, 64, 128) if size <= 2 * block]
    for mine, listed, warps, stages in itertools.product(own, walked, (4, 8), (1, 2, 3, 4)):
        query, key = (listed, mine) if kernel == "dkv" else (mine, listed)
        yield triton_tuning.Tiles(query, key, warps, stages)


def candidates(implementation: str, kernel: Pass, block: int) -> list[Tiles]:
    """What to try."""
    if implementation == "mosaic":
        return list(mosaic_candidates(block))
    return list(triton_candidates(kernel, block))


def make_call(implementation: str, kernel: Pass, tiles: Tiles, scale: float) -> Callable[..., Any]:
    """A function of (arguments, what the forward and the inversion gave) that runs the kernel."""
    calls = importlib.import_module(f"pallas_kernels.block_sparse_attention.{implementation}.calls")
    options = Options(scale, interpret=False)

    def run(
        arguments: Arguments, lists: BlockLists, out: jax.Array, lse: jax.Array, inverted: Any
    ) -> Any:
        q, k, v, dout = arguments
        if kernel == "forward":
            return calls.forward(Operands(q, k, v, lists), options, tiles)
        residuals = Residuals(q, k, v, lists, out, lse)
        shared = Cotangents(dout, lse, jnp.zeros_like(lse))
        if kernel == "dq":
            return calls.query_gradient(residuals, shared, options, tiles)
        return calls.key_gradients(residuals, shared, inverted, options, tiles)

    return run


def measured(
    implementation: str, shape: Shape, sparsity: float, kernels: Sequence[Pass]
) -> Iterator[dict[str, Any]]:
    """Times of each kernel with each candidate, or why it did not run."""
    calls = importlib.import_module(f"pallas_kernels.block_sparse_attention.{implementation}.calls")
    sets, lists = make_arguments(shape), make_lists(shape, sparsity, "random")
    scale = shape.width**-0.5
    forward = jax.jit(partial(calls.forward, options=Options(scale, interpret=False)))
    inverted = jax.jit(invert)(lists)
    given = [(each, lists, *forward(Operands(*each[:3], lists)), inverted) for each in sets]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        tried = [
            (kernel, tiles)
            for kernel in kernels
            for tiles in candidates(implementation, kernel, shape.block)
        ]
        programs = {
            case: pool.submit(rotating, make_call(implementation, *case, scale), given)
            for case in tried
        }
        for (kernel, tiles), program in programs.items():
            row = {"kernel": kernel, "block": shape.block, "width": shape.width} | vars(tiles)
            try:
                yield row | {"us": device_time(program.result(), given).median}
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # too much shared memory
                yield row | {"error": str(error).splitlines()[0]}


def main(argv: list[str]) -> int:
    """Measures, writes JSON and prints the fastest tiles of each kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--implementation", choices=KERNELS, default=KERNELS[0])
    add("--tokens", type=int, default=32_768)
    add("--sparsity", type=float, default=0.9)
    add("--blocks", type=int, nargs="+", default=[64, 128])
    add("--widths", type=int, nargs="+", default=[128, 64])
    add("--kernels", nargs="+", choices=get_args(Pass), default=get_args(Pass))
    add("--out", type=Path, default=Path("tuned_block_sparse_attention.json"))
    options = parser.parse_args(argv)
    require_gpu()
    made_with, rows = provenance(["jax", "jaxlib"]), []
    for block, width in itertools.product(options.blocks, options.widths):
        shape = Shape(options.tokens, width=width, block=block)
        for row in measured(options.implementation, shape, options.sparsity, options.kernels):
            rows.append(row)
            options.out.write_text(json.dumps(made_with | {"rows": rows}, indent=1) + "\n")
        for kernel in options.kernels:
            found = [
                r for r in rows if (r["kernel"], r["block"], r["width"]) == (kernel, block, width)
            ]
            best = sorted((r for r in found if "us" in r), key=lambda r: r["us"])
            for each in best[:4]:
                print(each)
            print(f"{kernel}: {len(found) - len(best)} of {len(found)} did not run")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
