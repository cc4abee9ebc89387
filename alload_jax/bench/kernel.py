"""Times the LayerNorm-Modulate kernels against XLA's fusion."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from alload_jax.bench.device import DeviceTime, call_time
from alload_jax.files import Json
from pallas_kernels import devices, layernorm_modulate, residual_layernorm_modulate
from pallas_kernels.layernorm_modulate.tuning import Workload, way_for

Function = Literal[
    "layernorm_modulate",
    "residual_layernorm_modulate",
    "segment_layernorm_modulate",
    "token_layernorm_modulate",
]
Pass = Literal["forward", "backward"]

TENSORS: dict[tuple[Function, Pass], int] = {
    ("layernorm_modulate", "forward"): 2,
    ("layernorm_modulate", "backward"): 3,
    ("residual_layernorm_modulate", "forward"): 4,
    ("residual_layernorm_modulate", "backward"): 6,
    ("segment_layernorm_modulate", "forward"): 2,
    ("segment_layernorm_modulate", "backward"): 3,
    ("token_layernorm_modulate", "forward"): 6,
    ("token_layernorm_modulate", "backward"): 9,
}
"""How many tensors of x's bytes a pass must read and write at least: x → y; x, dy → dx;
x, y → h, out; h, y, dh, dout → dx, dy. A float32 scale or shift for each token counts two."""

SEGMENTS = 16
"""Equal segments of each row in `segment_layernorm_modulate`."""

_STREAMS = 4
"""Arrays that a backward reads at most."""

_ROTATED_BYTES = 512 << 20
"""What the sets of arguments together exceed: several times the L2 cache of any GPU."""

_MOST_SETS = 8
"""Each costs a compilation. Shapes so small that eight stay in the cache do so in a model, too."""


class Entry(NamedTuple):
    """One measurement.

    Attributes:
      workload: its name.
      shape: [B, S, D] of x, bfloat16; scale and shift are float32.
      function: what was run.
      direction: forward or backward.
      implementation: triton, mosaic, xla, or the name that a rival gives itself.
      bytes_moved: that the pass must read and write at least.
      us, us_low, us_high, kernels: as in `DeviceTime`.
    """

    workload: str
    shape: tuple[int, int, int]
    function: Function
    direction: Pass
    implementation: str
    bytes_moved: int
    us: float
    us_low: float
    us_high: float
    kernels: tuple[tuple[str, float], ...]


class Arguments(NamedTuple):
    """Of one call: x, y, dh, dout [B, S, D] bfloat16; scale, shift, gate [B, D] float32."""

    x: jax.Array
    y: jax.Array
    dh: jax.Array
    dout: jax.Array
    scale: jax.Array
    shift: jax.Array
    gate: jax.Array


Rival = Callable[[Function, Pass, Sequence[Arguments]], Iterator[tuple[str, DeviceTime]]]
"""Measures the same function in other libraries: (name, time) of each that has it."""


def measure(
    workloads: dict[str, Workload], functions: Sequence[Function], rivals: Sequence[Rival] = ()
) -> Iterator[Entry]:
    """Measures all workloads, functions and passes, of rivals too."""
    passes: tuple[Pass, ...] = get_args(Pass)
    for name, workload in workloads.items():
        sets, shape = make_arguments(workload), workload.shape
        for function, direction in itertools.product(functions, passes):
            moved = TENSORS[function, direction] * math.prod(shape) * sets[0].x.dtype.itemsize
            for implementations in (_ours, *rivals):
                for found, time in implementations(function, direction, sets):
                    yield Entry(name, shape, function, direction, found, moved, *time)


def _ours(
    function: Function, direction: Pass, sets: Sequence[Arguments]
) -> Iterator[tuple[str, DeviceTime]]:
    for implementation in ("triton", "xla"):
        yield implementation, _time(function, direction, implementation, sets)


def mosaic(
    function: Function, direction: Pass, sets: Sequence[Arguments]
) -> Iterator[tuple[str, DeviceTime]]:
    """The backward through Mosaic GPU, as a `Rival` of the Triton kernels, where it has one."""
    x = sets[0].x
    way = way_for("residual_backward", x.shape[-1], _STREAMS * x.dtype.itemsize)
    if direction == "forward" or function == "token_layernorm_modulate" or way is None:
        return
    if devices.unsupported_mosaic(x):
        return
    yield "mosaic", _time(function, direction, "mosaic", sets)


def make_arguments(workload: Workload) -> list[Arguments]:
    """Two to eight sets of random arguments, that together exceed the L2 cache if they can."""

    @jax.jit
    def make(seed: jax.Array) -> Arguments:
        keys = jax.random.split(jax.random.key(seed), 7)
        wide = [jax.random.normal(key, workload.shape, jnp.bfloat16) for key in keys[:4]]
        tables = [jax.random.normal(key, (workload.batch, workload.dim)) for key in keys[4:]]
        return Arguments(*wide, *tables)

    count = max(2, math.ceil(_ROTATED_BYTES / (4 * math.prod(workload.shape))))
    return [make(jnp.int32(seed)) for seed in range(min(count, _MOST_SETS))]


def _time(
    function: Function, direction: Pass, implementation: Any, sets: Sequence[Arguments]
) -> DeviceTime:
    """XLA's backward starts from the inputs, as its fusions do; the kernels' from what is kept."""
    forward, inputs, cotangent = calls_of(function, implementation)
    if direction == "forward":
        calls = [inputs(arguments) for arguments in sets]
        return call_time(forward, calls)
    operands = [(inputs(arguments), cotangent(arguments)) for arguments in sets]
    if implementation == "xla":
        return call_time(
            lambda given, cotangents: jax.vjp(forward, *given)[1](cotangents), operands
        )
    linearise = jax.jit(lambda given: jax.vjp(forward, *given)[1])
    kept = [(linearise(given), cotangents) for given, cotangents in operands]
    return call_time(lambda vjp, cotangents: vjp(cotangents), kept)


def calls_of(function: Function, implementation: Any) -> tuple[Callable, Callable, Callable]:
    """The function, its inputs from `Arguments`, and its output's cotangent from them."""
    modulate = partial(layernorm_modulate, implementation=implementation)

    def segmented(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        tokens = jnp.arange(x.shape[1], dtype=jnp.int32)
        ids = jnp.broadcast_to(tokens * SEGMENTS // x.shape[1], x.shape[:2])
        ids = jax.lax.optimization_barrier(ids)  # in training they are data, not constants
        return modulate(x, scale, shift, segment_ids=ids)

    def inputs(a: Arguments) -> tuple[jax.Array, ...]:
        if function == "residual_layernorm_modulate":
            return a.x, a.y, a.gate, a.scale, a.shift
        rows = {"segment_layernorm_modulate": SEGMENTS, "token_layernorm_modulate": a.x.shape[1]}
        if function not in rows:
            return a.x, a.scale, a.shift
        scale, shift = (
            jnp.repeat(table[:, None], rows[function], axis=1) for table in (a.scale, a.shift)
        )
        return a.x, scale, shift

    if function == "residual_layernorm_modulate":
        gated = partial(residual_layernorm_modulate, implementation=implementation)
        return gated, inputs, lambda a: (a.dh, a.dout)
    forward = segmented if function == "segment_layernorm_modulate" else modulate
    return forward, inputs, lambda a: a.dout


def ratios(entries: Sequence[Entry], against: str) -> dict[tuple[str, str, str], float]:
    """How many times faster the kernels are, by (workload, function, pass)."""
    us = {(*_case(e), e.implementation): e.us for e in entries}
    return {
        _case(e): us[(*_case(e), against)] / e.us
        for e in entries
        if e.implementation == "triton" and (*_case(e), against) in us
    }


def summary(entries: Sequence[Entry], copy_bytes_per_second: float) -> list[Json]:
    """For each function and pass: the geometric mean and the least ratio, and share of the floor.

    The floor of a pass is the bytes it must move at the rate of the device's own copies.
    """
    found = []
    for function, direction in TENSORS:
        chosen = [e for e in entries if (e.function, e.direction) == (function, direction)]
        shares = [
            share_of_copy(e, copy_bytes_per_second) for e in chosen if e.implementation == "triton"
        ]
        if not shares:
            continue
        others = {e.implementation for e in chosen} - {"triton"}
        row: Json = {"function": function, "direction": direction}
        row["least_share_of_copy"] = min(shares)
        for other in sorted(others):
            times = list(ratios(chosen, other).values())
            row[f"times_{other}_mean"] = statistics.geometric_mean(times)
            row[f"times_{other}_least"] = min(times)
        found.append(row)
    return found


def share_of_copy(entry: Entry, copy_bytes_per_second: float) -> float:
    """Bytes that must be moved a second, over those that a plain copy moves."""
    return entry.bytes_moved / (entry.us * 1e-6) / copy_bytes_per_second


def _case(entry: Entry) -> tuple[str, str, str]:
    return (entry.workload, entry.function, entry.direction)
