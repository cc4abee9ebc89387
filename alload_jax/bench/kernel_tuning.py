"""Searches how the LayerNorm-Modulate kernels divide rows of a width fastest, on this GPU."""

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from alload_jax.bench.device_time import device_time, rotating
from alload_jax.bench.kernel import measure
from pallas_kernels.layernorm_modulate.operands import Operands, Options, Residuals, normalise
from pallas_kernels.layernorm_modulate.triton import calls
from pallas_kernels.layernorm_modulate.triton.division import Division, Pass
from pallas_kernels.layernorm_modulate.triton.tuned_files import Tuned
from pallas_kernels.layernorm_modulate.triton.tuning import division_for, divisions
from pallas_kernels.layernorm_modulate.workloads import Workload

ELEMENTS = 50_000_000
"""Of x: as in a training step, and far more than the L2 cache holds."""
TENSORS: dict[Pass, int] = {
    "forward": 2,
    "backward": 3,
    "residual_forward": 4,
    "residual_backward": 6,
}
"""How many tensors of x's bytes each kernel must read and write at least."""
_PER_CORE = {
    "forward": {1: (16, 24), 4: (8, 24), 8: (4, 8)},
    "backward": {1: (8, 16), 4: (2, 4), 8: (1, 2)},
}
"""Programs of each multiprocessor, by warps of a program."""
_MOST_EACH = 80
"""Elements of a row that a thread holds at most; more would leave the registers."""
_FEW_EACH = 16
"""Up to as many, nothing is gained by holding less."""


class Timed(NamedTuple):
    """The time of one division: its kernel, width, µs, and bytes a second."""

    kernel: Pass
    dim: int
    division: Division
    us: float
    bytes_per_second: float


def candidates(kernel: Pass, dim: int) -> Iterator[Division]:
    """Divisions of rows of `dim` elements, but those that cannot be fast."""
    backward = kernel.endswith("backward")
    for warps, lanes in itertools.product((1, 4, 8), (4, 8)):
        tile, each = 32 * warps * lanes, dim / (32 * warps)
        if tile // 2 >= dim or not 2 <= each <= _MOST_EACH:
            continue
        for per_core in _PER_CORE["backward" if backward else "forward"][warps]:
            yield Division(tile, warps, per_core)
            if backward and each >= _FEW_EACH:
                yield Division(tile, warps, per_core, prefetch=False, keep_in_registers=False)


def make_calls(kernel: Pass, dim: int, count: int) -> tuple[Any, list[tuple[Any, ...]]]:
    """A function of (blocks) → call, and sets of its arguments."""
    shape, residual = (1, ELEMENTS // dim, dim), kernel.startswith("residual")

    def make(key: jax.Array) -> tuple[Operands, jax.Array, jax.Array]:
        keys = jax.random.split(key, 7)
        x, y, dh, dout = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:4])
        scale, shift, gate = (jax.random.normal(k, (1, dim)) for k in keys[4:])
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
    blocks = Division(512, 4, 24).blocks(jax.devices()[0].core_count)
    (statistics,) = calls.forward(operands, options, blocks, ["statistics"])
    shift = jnp.zeros((0,))
    return Residuals(operands.x, statistics, operands.scale, shift, operands.y, operands.gate, None)


def timed(
    kernel: Pass, dim: int, divisions: Sequence[Division], pool: ThreadPoolExecutor
) -> list[Timed]:
    """The time of each division, the shortest first."""
    call, sets = make_calls(kernel, dim, 2)
    cores = jax.devices()[0].core_count
    programs = pool.map(lambda each: rotating(call(each.blocks(cores)), sets), divisions)
    moved = TENSORS[kernel] * (ELEMENTS // dim) * dim * 2
    found = []
    for division, program in zip(divisions, programs, strict=True):
        us = device_time(program, sets, iterations=5).median
        found.append(Timed(kernel, dim, division, us, moved / us * 1e6))
    return sorted(found, key=lambda each: each.us)


def check(dims: Sequence[int], device_kind: str) -> Iterator[Timed]:
    """Times each width and kernel with what is used now."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for dim, kernel in itertools.product(dims, get_args(Pass)):
            yield from timed(kernel, dim, [division_for(divisions(kernel, device_kind), dim)], pool)


class Best(NamedTuple):
    """The time of the division that was used so far, and that of the fastest."""

    used: Timed
    best: Timed


def search(dims: Sequence[int], device_kind: str, seconds: float) -> Iterator[Best]:
    """Times all candidates for each width and kernel; begins new widths until time is up.

    Args:
      dims: widths, the most important first.
      device_kind: of this device.
      seconds: no width is begun after as many.
    """
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for dim in dims:
            if time.monotonic() > deadline:
                return
            for kernel in get_args(Pass):
                used = division_for(divisions(kernel, device_kind), dim)
                ways = list(dict.fromkeys([used, *candidates(kernel, dim)]))
                found = timed(kernel, dim, ways, pool)
                yield Best(next(each for each in found if each.division == used), found[0])


def tuned(
    found: Sequence[Best],
    before: Tuned | None,
    ratios: Mapping[int, tuple[float, float]] | None = None,
) -> Tuned:
    """What a device's file says after a search: its widths replace those that were known.

    Args:
      found: what was searched.
      before: what the file said before; None without one.
      ratios: the result of `times_xla`, if that was measured already.
    """
    known: dict[Pass, dict[int, Division]] = {kernel: {} for kernel in get_args(Pass)}
    for kernel in known:
        known[kernel] |= before.divisions[kernel] if before else {}
    for _, best in found:
        known[best.kernel][best.dim] = best.division
    return Tuned(known, {**(before.times_xla if before else {}), **(ratios or {})})


def times_xla(dims: Sequence[int]) -> dict[int, tuple[float, float]]:
    """How many times as fast as XLA's fusion each width is: forward, backward.

    It measures what is used now, so the search's result is to be written before.
    """
    workloads = {str(dim): Workload(1, ELEMENTS // dim, dim, "measured") for dim in dims}
    us = {
        (entry.workload, entry.direction, entry.implementation): entry.us
        for entry in measure(workloads, ["layernorm_modulate"])
    }

    return {
        dim: (
            us[str(dim), "forward", "xla"] / us[str(dim), "forward", "triton"],
            us[str(dim), "backward", "xla"] / us[str(dim), "backward", "triton"],
        )
        for dim in dims
    }
