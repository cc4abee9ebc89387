"""Training steps over a grid of micro-batches, timed; and the memory that they take, compiled.

What is measured is the whole step: forward, backward, optimizer and EMA, on one device. Memory is
first read off compiled programs, so that nothing is run that cannot fit.
"""

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from alload_jax.bench.calibration_cases import Case, grid
from alload_jax.bench.step import Step, out_of_memory
from alload_jax.errors import InputError
from alload_jax.planning.cost import MemoryModel, bucketed_cost
from alload_jax.planning.fit import Point, fit_memory, fit_quadratic

LONGEST = 80_000
"""Tokens of the longest sequence, where neither memory nor the user sets another bound."""
_MEMORY_LENGTH = 4_096
_MEMORY_SIZES = (1, 2, 4)
_RAM_SHARE = 0.5
_TIMED_SECONDS = 1.5
"""Steps are repeated for about as long, 3 to 15 times; 1 to 3 times those that take longer."""


@dataclass(frozen=True)
class Bounds:
    """What a calibration may take.

    Attributes:
      seconds: for the grid, compilation included.
      shortest, longest: sequence lengths; None for as long as fits, at most `LONGEST`.
      margin: share of memory that stays free.
      memory: bytes of the device; None asks JAX, or takes half of the host's for CPUs.
    """

    seconds: float = 300.0
    shortest: int = 256
    longest: int | None = None
    margin: float = 0.05
    memory: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
      seconds, least, most: median and range of the timed steps; None where there were none.
      repeats: timed steps.
      bytes: that the step takes at most, by its compiled programs; None if not compiled.
      note: why it was not measured.
    """

    case: Case
    seconds: float | None = None
    least: float | None = None
    most: float | None = None
    repeats: int = 0
    bytes: int | None = None
    note: str | None = None

    def point(self) -> Point:
        """The measurement, for fits."""
        assert self.seconds is not None
        return Point(self.case.rows, self.case.seq_len, self.seconds)


@dataclass(frozen=True)
class MemoryFinding:
    """Memory by compiled programs.

    Attributes:
      limit: bytes of the device that JAX may use.
      sizes: (case, bytes) of long rows and of many short ones, whose conditions take memory too.
      model: fitted to them.
      margin: share of the limit that stays free.
      shortest: tokens of the shortest sequence; M_mem must hold for it too.
    """

    limit: float
    sizes: list[tuple[Case, int]]
    model: MemoryModel
    margin: float
    shortest: int

    @property
    def m_mem(self) -> int:
        """Most tokens of a micro-batch."""
        return self.model.max_tokens(self.limit, self.margin, self.shortest)


def device_memory(given: float | None) -> float:
    """Bytes that a step may take: those given, JAX's limit, or for CPUs half of the host's."""
    if given is not None:
        return given
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return _RAM_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Calibration:
    """Measures the steps of one model on this process's first device."""

    def __init__(self, step: Step, bounds: Bounds):
        self.step = step
        self.bounds = bounds
        self._programs: dict[Case, Any] = {}
        self._workers = max(1, (os.cpu_count() or 1) // 4)
        self._compile_seconds = 0.0
        step.update = step.update.lower(step.state, step.accumulator).compile()
        self._update_bytes = step.update.memory_analysis().temp_size_in_bytes
        self._resident = sum(x.nbytes for x in jax.tree.leaves((step.state, step.accumulator)))

    def memory(self) -> MemoryFinding:
        """Compiles small sizes of long and of short rows, runs none, and fits bytes over tokens.

        Raises:
          InputError: not even one token fits.
        """
        long = min(_MEMORY_LENGTH, self.bounds.longest or _MEMORY_LENGTH)
        short = self.bounds.shortest
        kinds = [
            [Case(n, long) for n in _MEMORY_SIZES],
            [Case(max(1, long // short) * n, short) for n in _MEMORY_SIZES],
        ]
        cases = list(dict.fromkeys(case for found in kinds for case in found))
        self._compile(cases)
        bytes_ = {case: self._bytes(case) for case in cases}
        model = fit_memory(
            [c.rows for c in cases], [c.tokens for c in cases], [bytes_[c] for c in cases]
        )
        limit, margin = device_memory(self.bounds.memory), self.bounds.margin
        finding = MemoryFinding(limit, list(bytes_.items()), model, margin, short)
        if finding.m_mem < self.bounds.shortest:
            raise InputError(
                f"{limit / 1e9:.1f} GB hold {finding.m_mem} tokens, fewer than the shortest "
                f"sequence, {self.bounds.shortest}; give more memory or a smaller --shortest"
            )
        return finding

    def measure(self, m_mem: int) -> Iterator[Outcome]:
        """Times the grid within the time and memory that there are, fewest tokens first."""
        deadline = time.perf_counter() + self.bounds.seconds
        longest = min(self.bounds.longest or LONGEST, m_mem - m_mem % self.bounds.shortest)
        waiting = grid(self.bounds.shortest, longest, m_mem)
        points: list[Point] = []
        while waiting:
            # A few at a time: XLA compiles one program on several cores already.
            now, waiting = waiting[: self._workers], waiting[self._workers :]
            left = deadline - time.perf_counter() - self._compile_seconds
            chosen = []
            for case in now:
                left -= (needed := _seconds_needed(points, case))
                chosen += [case] * (left >= 0)
                left += needed * (left < 0)
            for case in (c for c in now if c not in chosen):
                yield Outcome(case, note="left out: no time left")
            self._compile(chosen)
            for case in chosen:
                outcome = self._time(case)
                if outcome.seconds is not None:
                    points.append(outcome.point())
                yield outcome

    def _compile(self, cases: Sequence[Case]) -> None:
        """Compiles what is not compiled yet, in parallel; out of memory leaves an error behind."""
        missing = [case for case in cases if case not in self._programs]
        begin = time.perf_counter()
        with ThreadPoolExecutor(self._workers) as pool:
            self._programs.update(zip(missing, pool.map(self._compile_one, missing), strict=True))
        if missing:
            rounds = -(-len(missing) // self._workers)
            self._compile_seconds = (time.perf_counter() - begin) / rounds

    def _compile_one(self, case: Case) -> Any:
        try:
            return self.step.compile(case.latents(self.step.model.patch_size))
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            return None

    def _bytes(self, case: Case) -> int:
        """Most bytes in use during a step, by its compiled programs."""
        latents = case.latents(self.step.model.patch_size)
        batch = sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self.step.batch_shape(latents))
        )
        program = self._programs[case]
        if program is None:
            raise InputError(f"{case}: does not fit the device; use a larger one or model.remat")
        # Outputs take nothing: all of them are arguments that were donated.
        temporary = program.memory_analysis().temp_size_in_bytes
        return self._resident + batch + max(temporary, self._update_bytes)

    def _time(self, case: Case) -> Outcome:
        """Runs a case, unless it cannot fit."""
        if self._programs[case] is None:
            return Outcome(case, note="out of memory when compiled")
        bytes_, limit = self._bytes(case), device_memory(self.bounds.memory)
        program = self._programs.pop(case)
        if bytes_ > limit:
            return Outcome(case, bytes=bytes_, note=f"needs {bytes_ / 1e9:.1f} GB")
        try:
            batch = self.step.batch(case.latents(self.step.model.patch_size))
            first = self.step.run(program, batch)
            repeats = _repeats(first)
            seconds = [self.step.run(program, batch) for _ in range(repeats)]
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            self.step.renew()
            return Outcome(case, bytes=bytes_, note="out of memory")
        except FloatingPointError as error:
            self.step.renew()
            return Outcome(case, bytes=bytes_, note=str(error))
        median = statistics.median(seconds)
        return Outcome(case, median, min(seconds), max(seconds), repeats, bytes_)


def _seconds_needed(points: Sequence[Point], case: Case) -> float:
    """To measure a case, judged by the points so far; 0 where there are none."""
    if not points:
        return 0.0
    step = _expected(points, case)
    return step * (1 + _repeats(step))


def _repeats(first: float) -> int:
    """Timed steps after a first one of so many seconds."""
    if first > _TIMED_SECONDS:
        return 3 if first < 8 else 1
    return max(3, min(15, int(_TIMED_SECONDS / first)))


def _expected(points: Sequence[Point], case: Case) -> float:
    """Seconds of a step that is still to be measured, rather too many than too few."""
    if len(points) >= 6:
        model = fit_quadratic(points).model
        return float(bucketed_cost(model, case.rows, case.seq_len))  # type: ignore[arg-type]
    last = points[-1]
    return last.seconds * max(1.0, case.tokens * case.seq_len / (last.tokens * last.seq_len))
