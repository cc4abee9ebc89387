"""Searches how the LayerNorm-Modulate kernels divide rows of a width fastest, on this GPU.

Processes compile at the same time, and one after another measures. Most of the time goes to tracing
and compiling, which threads of one process do not share well.
"""

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from alload_jax.bench.device import device_time, rotating
from alload_jax.bench.kernel import measure
from alload_jax.processes import follow_parent
from pallas_kernels.layernorm_modulate import triton
from pallas_kernels.layernorm_modulate.operands import (
    NormOperands,
    NormOptions,
    NormResiduals,
    normalise,
)
from pallas_kernels.layernorm_modulate.tuning import (
    Division,
    Pass,
    Tuned,
    Workload,
    division_for,
    divisions,
    pads_little,
)

ELEMENTS = 50_000_000
"""Of x: as in a training step, and far more than the L2 cache holds."""
TENSORS: dict[Pass, int] = {
    "forward": 2,
    "backward": 3,
    "residual_forward": 4,
    "residual_backward": 6,
    "sum_backward": 4,
}
"""How many tensors of x's bytes each kernel must read and write at least."""
_PER_CORE: dict[str, dict[int, tuple[int, ...]]] = {
    "forward": {1: (24, 16), 2: (24, 12), 4: (24, 8), 8: (4, 8), 16: (4, 2)},
    "backward": {1: (8, 16), 2: (8, 4), 4: (4, 2, 3), 8: (2, 1, 3), 16: (1, 2), 32: (1,)},
}
"""Programs of each multiprocessor, by warps of a program: the usual number, and others."""
_MOST_EACH = {"forward": 80, "backward": 48}
"""Elements of a row that a thread holds at most; more would leave the registers."""
_REFINED = 2
"""Divisions whose programs and loads are varied."""
_SETS = 2
"""Sets of arguments in turn, so that the cache does not hold those of the next call."""


class Timed(NamedTuple):
    """The time of one division: its kernel, width, µs, and bytes a second."""

    kernel: Pass
    dim: int
    division: Division
    us: float
    bytes_per_second: float


def candidates(kernel: Pass, dim: int) -> Iterator[Division]:
    """Divisions of rows of `dim` elements into tiles, but those that cannot be fast."""
    kind = _kind(kernel)
    for warps, lanes in itertools.product(_PER_CORE[kind], (4, 8)):
        tile, each = 32 * warps * lanes, dim / (32 * warps)
        if tile // 2 >= dim or not 2 <= each <= _MOST_EACH[kind]:
            continue
        usual = Division(tile, warps, _PER_CORE[kind][warps][0])
        yield usual
        if dim % tile and pads_little(dim, tile):
            yield replace(usual, equal_tiles=True)


def variants(kernel: Pass, division: Division) -> Iterator[Division]:
    """The same tiles with other numbers of programs, and other uses of registers."""
    kind = _kind(kernel)
    uses: list[dict[str, bool]] = [{}]
    if kind == "backward":
        less = {"keep_in_registers": False}
        uses += [less, less | {"prefetch": False}]
    for per_core, use in itertools.product(_PER_CORE[kind][division.num_warps], uses):
        yield replace(division, per_core=per_core, **use)


def _kind(kernel: Pass) -> str:
    return "backward" if kernel.endswith("backward") else "forward"


class _Calls:
    """Calls of a kernel with rows of one width: compiled without arrays, and run with them."""

    def __init__(self, kernel: Pass, dim: int):
        self.kernel, self.dim = kernel, dim
        self._gated = kernel.startswith("residual")
        self._sum = self._gated or kernel.startswith("sum")
        key = jax.random.key(0)
        self._shapes = jax.eval_shape(self._in_form, key)
        self._make = jax.jit(self._in_form).lower(key).compile()

    def compile(self, division: Division) -> Compiled:
        """A program that runs the kernel so on each of `_SETS` sets of arguments."""
        outputs = ("out", "statistics", *(["h"] if self._sum else []))

        def call(*given: Any) -> Any:
            if self.kernel.endswith("forward"):
                [operands] = given
                return triton.compute_forward(operands, self._options, division, outputs)
            residuals, dh, dout = given
            dx, dy, tables = triton.backward(residuals, dh, dout, self._options, division)
            # A program that returns an array twice may copy it.
            return dx, None if dy is dx else dy, tables

        return rotating(call, [self._shapes] * _SETS)

    def sets(self) -> list[tuple[object, ...]]:
        """Sets of arguments."""
        return [self._make(jax.random.key(n)) for n in range(_SETS)]

    def _in_form(self, key: jax.Array) -> tuple[object, ...]:
        shape, keys = (1, ELEMENTS // self.dim, self.dim), jax.random.split(key, 7)
        x, y, dh, dout = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:4])
        scale, shift, gate = (jax.random.normal(k, (1, self.dim)) for k in keys[4:])
        more = (y if self._sum else None, gate if self._gated else None)
        operands, self._options = normalise(
            self.kernel,
            NormOperands(x, scale, shift, *more),
            eps=1e-6,
            residual_dtype=None,
        )
        if self.kernel.endswith("forward"):
            return (operands,)
        return _residuals(operands, self._options), dh if self._sum else None, dout


def _residuals(operands: NormOperands, options: NormOptions) -> NormResiduals:
    """As if x were the norm's input: the time does not depend on the values."""
    division = Division(512, 4, 24)
    (statistics,) = triton.compute_forward(operands, options, division, ["statistics"])
    y, gate = None if operands.gate is None else operands.y, operands.gate
    return NormResiduals(operands.x, statistics, operands.scale, jnp.zeros((0,)), y, gate, None)


Group = tuple[Pass, int, Division]
"""A kernel, a width, and how it is divided now."""
Measured = Callable[[Group], list[Timed]]

_measuring: Any = None
"""In a process of its own, the lock that whoever measures holds."""


def _begin(lock: Any) -> None:
    """Begins a process, which ends with the one that began it and leaves Ctrl-C to that one."""
    global _measuring
    _measuring = lock
    follow_parent()


def timed_now(group: Group) -> list[Timed]:
    """The time of the division that is used now."""
    kernel, dim, used = group
    return _timed(_Calls(kernel, dim), [used])


def timed_candidates(group: Group) -> list[Timed]:
    """The times of the division that is used now, the candidates, and variants of the fastest."""
    kernel, dim, used = group
    given = _Calls(kernel, dim)
    found = _timed(given, list(dict.fromkeys([used, *candidates(kernel, dim)])))
    fastest = sorted(found, key=lambda each: each.us)[:_REFINED]
    known = {each.division for each in found}
    more = [one for each in fastest for one in variants(kernel, each.division) if one not in known]
    return found + _timed(given, list(dict.fromkeys(more)))


def _timed(given: _Calls, divisions: Sequence[Division]) -> list[Timed]:
    programs = [given.compile(each) for each in divisions]
    moved = TENSORS[given.kernel] * (ELEMENTS // given.dim) * given.dim * 2
    found = []
    with _measuring:
        sets = given.sets()
        for division, program in zip(divisions, programs, strict=True):
            us = device_time(program, sets, iterations=5).us
            found.append(Timed(given.kernel, given.dim, division, us, moved / us * 1e6))
        del sets  # before another process takes memory for its own
    return found


def _in_processes(
    work: Measured, groups: Iterable[Group], processes: int, deadline: float
) -> Iterator[list[Timed]]:
    """The result of each group as it is done; none is begun after the deadline."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (context.Lock(),))
    waiting, running = iter(groups), set[Future[list[Timed]]]()
    try:
        while True:
            wanted = processes - len(running) if time.monotonic() < deadline else 0
            running |= {pool.submit(work, each) for each in itertools.islice(waiting, wanted)}
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)
    except BaseException:
        # Without waiting for what they are compiling. The pool's own thread joins them: where two
        # threads wait for one process, one of them is not told that it has ended.
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _groups(dims: Sequence[int], kernels: Sequence[Pass], device_kind: str) -> Iterator[Group]:
    for dim, kernel in itertools.product(dims, kernels):
        yield kernel, dim, division_for(divisions(kernel, device_kind), dim)


def check(dims: Sequence[int], device_kind: str, processes: int) -> Iterator[Timed]:
    """Times each width and kernel with what is used now."""
    groups = _groups(dims, get_args(Pass), device_kind)
    for found in _in_processes(timed_now, groups, processes, float("inf")):
        yield from found


class Best(NamedTuple):
    """The time of the division that was used so far, and that of the fastest."""

    used: Timed
    best: Timed


def search(
    dims: Sequence[int], kernels: Sequence[Pass], device_kind: str, seconds: float, processes: int
) -> Iterator[Best]:
    """Times candidates for each width and kernel.

    Args:
      dims: widths, the most important first.
      kernels: which are searched.
      device_kind: of this device.
      seconds: no kernel of a width is begun after as many.
      processes: that compile at the same time.
    """
    deadline = time.monotonic() + seconds
    groups = _groups(dims, kernels, device_kind)
    for found in _in_processes(timed_candidates, groups, processes, deadline):
        # The division that is used now is the first that was timed.
        yield Best(found[0], min(found, key=lambda each: each.us))


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
    known: dict[Pass, dict[int, Division]] = {
        kernel: dict(before.divisions[kernel]) if before else {} for kernel in get_args(Pass)
    }
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
