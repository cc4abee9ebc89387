"""Times the norm's backward at many widths: Mosaic kernel, Triton kernel, XLA's fusion.

    python benchmarks/wide_rows.py

Each call has 50 million elements of x. `of_copy` is the bytes that a backward must read and write a
second over those of a plain copy: `gated`, after x + gate·y, reads h, y and two cotangents and
writes two gradients; `sum`, after x + y, reads h and two cotangents and writes one gradient;
`plain` reads x and a cotangent and writes one gradient. The rows are one row of a batch (`row`), 42
of them (`batch`), or 42 segments of a packed row (`segments`).
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.bench.device import copy_bandwidth, device_time, require_gpu, rotating
from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.errors import run_command
from pallas_kernels import layernorm_modulate, residual_layernorm_modulate, segmentation

_ELEMENTS, _SEGMENTS, _SETS = 50_000_000, 42, 2
_TENSORS = {"gated": 6, "sum": 4, "plain": 3}
_KERNELS = ("mosaic", "triton")
_WIDTHS = (
    *(1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560, 3072, 3584, 4096, 4608, 5120, 5248, 5632),
    *(6144, 6272, 6656, 7168, 7296, 7680, 8064, 8192, 9216),
)
_WITH_XLA = (1536, 3072, 5120, 7296, 8192)
_PACKED = (1152, 1536, 2048, 2304, 3072, 4096, 5120)

_measuring: Any = None
"""In a process of its own, the lock that whoever measures holds."""


class Case(NamedTuple):
    """What is timed, as the module says."""

    dim: int
    function: str
    rows: str
    implementation: str


def cases(dim: int) -> Iterator[Case]:
    """Those of a width."""
    kinds = ("row", "batch", "segments") if dim in _PACKED else ("row",)
    for function in _TENSORS:
        for rows in kinds:
            for name in _KERNELS:
                yield Case(dim, function, rows, name)
    if dim in _WITH_XLA:
        yield Case(dim, "gated", "row", "xla")


def arguments(case: Case, key: jax.Array) -> tuple[Any, Any]:
    """x, scale and shift of a case, y of a sum, gate of a gated one; and the cotangents."""
    batch, dim = _SEGMENTS if case.rows == "batch" else 1, case.dim
    tokens = _ELEMENTS // dim // _SEGMENTS * _SEGMENTS
    shape, keys = (batch, tokens // batch, dim), jax.random.split(key, 7)
    table = (1, _SEGMENTS, dim) if case.rows == "segments" else (batch, dim)
    x, y, dh, dout = (jax.random.normal(each, shape, jnp.bfloat16) for each in keys[:4])
    scale, shift, gate = (jax.random.normal(each, table) for each in keys[4:])
    if case.function == "plain":
        return (x, scale, shift), dout
    return (x, scale, shift, y, gate if case.function == "gated" else None), (dh, dout)


def forward(case: Case, ids: Any, given: tuple[Any, ...]) -> Any:
    """The function that is differentiated; `ids` as `segmentation` gives them, or None."""
    options = {"segment_ids": ids, "implementation": case.implementation}
    if case.function == "plain":
        return layernorm_modulate(*given, **options)
    x, scale, shift, y, gate = given
    return residual_layernorm_modulate(x, y, gate, scale, shift, **options)


def segments_of(case: Case) -> Any:
    """The segments, prepared as a model prepares them for its layers; None without."""
    if case.rows != "segments":
        return None
    tokens = _ELEMENTS // case.dim // _SEGMENTS
    ids = jnp.repeat(jnp.arange(_SEGMENTS, dtype=jnp.int32), tokens)[None]
    return jax.jit(lambda ids: segmentation(ids, _SEGMENTS, case.dim))(ids)


def timed(case: Case, copy: float) -> dict[str, Any]:
    """A row of the result."""
    run = partial(forward, case, segments_of(case))
    made = jax.jit(partial(arguments, case)).lower(jax.random.key(0))
    given, cotangents = jax.tree.map(_shape, made.out_info)
    # XLA's backward starts from the inputs, as its fusions do.
    again = case.implementation == "xla"

    def start(given: Any) -> Any:
        return given if again else jax.vjp(run, given)[1]

    def pull(start: Any, cotangents: Any) -> Any:
        (gradients,) = (jax.vjp(run, start)[1] if again else start)(cotangents)
        # Those of x and y are one array, which a program would copy to return it twice.
        return gradients[:3] if case.function == "sum" else gradients

    kept = jax.jit(start).lower(given)
    make, keep = made.compile(), kept.compile()
    program = rotating(pull, [(jax.tree.map(_shape, kept.out_info), cotangents)] * _SETS)
    with _measuring:
        sets = [make(jax.random.key(n)) for n in range(_SETS)]
        sets = [(keep(given), cotangents) for given, cotangents in sets]
        time = device_time(program, sets, iterations=5)
        del sets  # before another process takes memory for its own
    moved = _TENSORS[case.function] * given[0].size * given[0].dtype.itemsize
    rate = moved / (time.us * 1e-6)
    return case._asdict() | {"us": time.us, "of_copy": rate / copy, "kernels": time.kernels}


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _begin(lock: Any) -> None:
    global _measuring
    _measuring = lock


def main(argv: list[str]) -> int:
    """Measures all cases and writes the result."""
    parser = benchmark_parser(__doc__, "wide_rows.json")
    parser.add_argument("--processes", type=int, default=10, help="that compile at the same time")
    options = parser.parse_args(argv)
    # The processes share the GPU's memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / (options.processes + 1):.3f}"
    require_gpu()
    context, copy = multiprocessing.get_context("spawn"), copy_bandwidth()
    record = Record(options.out, ["jax", "jaxlib"], copy_bytes_per_second=copy, cases=[])
    record.write()  # or fails before it measures
    chosen = [case for dim in _WIDTHS for case in cases(dim)]
    with ProcessPoolExecutor(options.processes, context, _begin, (context.Lock(),)) as pool:
        for row in pool.map(partial(timed, copy=copy), chosen):
            record.add(row)
            print({name: row[name] for name in (*Case._fields, "of_copy")}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
