"""Times training steps over a grid of micro-batches, and reads and checks their memory.

A measured step is a whole one: forward, backward, optimizer and EMA, on one device. The memory of
the compiled programs is read first, so that no step is run that cannot fit.

Each step runs in a separate process. The calling process must not use the device, because JAX
reserves most of a GPU's memory when it starts.
"""

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from alload_jax.bench.harness import measured
from alload_jax.bench.random_data import write_random_store
from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.sources.opening import open_source
from alload_jax.errors import InputError, out_of_memory
from alload_jax.files import Json
from alload_jax.models.common.cudnn import packed_unsupported_reason
from alload_jax.models.families import family_of
from alload_jax.planning.cost import CostFile, MemoryModel, bucketed_cost
from alload_jax.planning.factory import make_plan
from alload_jax.planning.fit import Point, fit_memory, fit_quadratic
from alload_jax.planning.samples import Geometry, Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.processes import cpus
from alload_jax.sharding.host_memory import host_bytes
from alload_jax.training.trial_step import Step, with_density

LEAST_POINTS = 5
"""Steps of the grid that a fit needs."""
_TARGETS = (4_096, 16_384, 65_536)
"""Approximate tokens of the micro-batches with several rows."""
_MAX_SIDE = 64


@dataclass(frozen=True)
class Case:
    """A micro-batch of the grid: `rows` sequences of `seq_len` tokens.

    Attributes:
      rows: number of sequences.
      seq_len: tokens of each, as plans count them.
      beside: how many of them are the condition's, in models with joint attention.
    """

    rows: int
    seq_len: int
    beside: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.seq_len

    def latents(self, patch_size: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """Latents (rows, frames, height, width) that make `seq_len` tokens per row.

        Width and height, in patches, are the largest divisors up to 64; the rest are frames. The
        cost depends only on the product.
        """
        tokens = self.seq_len - self.beside
        width = _largest_divisor(tokens)
        height = _largest_divisor(tokens // width)
        patches = (tokens // width // height, height, width)
        frames, height, width = (n * p for n, p in zip(patches, patch_size, strict=True))
        return (self.rows, frames, height, width)


def grid(shortest: int, longest: int, m_mem: int, beside: int = 0) -> list[Case]:
    """Cases with one and several rows of each length, by increasing tokens; lengths double.

    Lengths are those of latents; `beside` tokens of the condition come on top.
    """
    latents = [shortest * 2**n for n in range(64) if shortest * 2**n < longest] + [longest]
    lengths = [tokens + beside for tokens in latents]
    cases = {Case(1, s, beside) for s in lengths}
    cases |= {Case(t // s, s, beside) for s in lengths for t in _TARGETS if t >= 2 * s}
    return sorted((c for c in cases if c.tokens <= m_mem), key=lambda c: (c.tokens, c.seq_len))


def sparse_cases(shortest: int, longest: int, min_tokens: int) -> list[Case]:
    """Up to three lengths from `min_tokens` on, multiples of `shortest`, by increasing tokens.

    They measure layers with sparse attention, which shorter sequences do not use.
    """
    least = max(1, -(-min_tokens // shortest)) * shortest
    if least > longest:
        return []
    middle = round(math.sqrt(least * longest) / shortest) * shortest
    return [Case(1, seq_len) for seq_len in sorted({least, middle, longest})]


def _largest_divisor(number: int) -> int:
    return next(d for d in range(min(number, _MAX_SIDE), 0, -1) if number % d == 0)


DENSITIES = (0.1, 0.3)
"""Of the layers while sparse attention is measured."""
LONGEST = 80_000
"""Maximum tokens of a sequence, unless memory or the user sets a lower bound."""
_MEMORY_LENGTH = 4_096
_MEMORY_SIZES = (1, 2, 4)
_RAM_SHARE = 0.5
_NO_TIME = "skipped: no time left"
_TIMED_SECONDS = 1.5
"""Approximate seconds of timed steps per case: 3 to 15 steps, or 1 to 3 if a step takes longer."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a calibration.

    Attributes:
      seconds: time for the grid, including compilation.
      shortest, longest: range of sequence lengths, in tokens of latents; `longest` None for the
        longest that fits, at most `LONGEST`.
      margin: share of memory that stays free.
      memory: bytes of the device; None for the limit that JAX reports, or half of the host's
        memory on CPUs.
    """

    seconds: float = 300.0
    shortest: int = 256
    longest: int | None = None
    margin: float = 0.05
    memory: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of one case.

    Attributes:
      case: the micro-batch.
      seconds, least, most: median, minimum and maximum of the timed steps; None if none was timed.
      repeats: number of timed steps.
      bytes: peak bytes of the step according to its compiled programs; None if not compiled.
      note: why the case was not measured.
      density: of the attention of all layers; 1 for dense layers.
    """

    case: Case
    seconds: float | None = None
    least: float | None = None
    most: float | None = None
    repeats: int = 0
    bytes: int | None = None
    note: str | None = None
    density: float = 1.0

    def fields(self) -> Json:
        """What was to be measured, as JSON has it."""
        density = {} if self.density == 1 else {"density": self.density}
        return density | {"rows": self.case.rows, "seq_len": self.case.seq_len}

    def point(self) -> Point:
        """The measurement as a point for fits."""
        assert self.seconds is not None
        return Point(self.case.rows, self.case.seq_len, self.seconds)


@dataclass(frozen=True)
class MemoryFinding:
    """Memory of training steps according to their compiled programs.

    Attributes:
      limit: bytes of the device that JAX may use.
      sizes: (case, bytes) of long rows and of many short ones, whose conditions take memory too.
      model: the memory model fitted to `sizes`.
      margin: share of the limit that stays free.
      shortest: tokens of the shortest sequence, with its condition where plans count it; M_mem must
        be valid for it too.
    """

    limit: float
    sizes: list[tuple[Case, int]]
    model: MemoryModel
    margin: float
    shortest: int

    @property
    def m_mem(self) -> int:
        """Maximum tokens of a micro-batch."""
        return self.model.max_tokens(self.limit, self.margin, self.shortest)


def device_memory(given: float | None) -> float:
    """Bytes that a step may use: `given`, JAX's limit, or half of the host's memory on CPUs."""
    if given is not None:
        return given
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return _RAM_SHARE * host_bytes()


class Calibration:
    """Measures the steps of one model on this process's first device.

    A model with sparse attention comes with dense layers (`with_density`), for the grid.
    """

    def __init__(self, step: Step, bounds: Bounds):
        self.step = step
        self.bounds = bounds
        self._workers = max(1, cpus() // 4)
        self._points: list[Point] = []
        self._compiled, self._all_seconds = 0, 0.0
        self._prepare()

    def _prepare(self) -> None:
        """Compiles the update; programs of a model that the step had before are of no use."""
        step = self.step
        self._programs: dict[Case, Compiled | None] = {}
        self._compile_seconds = 0.0
        step.compile_update()
        self._update_bytes = step.update.memory_analysis().temp_size_in_bytes
        self._resident = sum(x.nbytes for x in jax.tree.leaves((step.state, step.accumulator)))

    def memory(self) -> MemoryFinding:
        """Compiles small micro-batches of long and of short rows and fits their bytes over tokens.

        No program is run.

        Raises:
          InputError: the shortest sequence does not fit, or compiling takes so long that the grid's
            time is too short for a fit.
        """
        sparse = self.step.model.sparse_attention
        long = max(_MEMORY_LENGTH, sparse.min_tokens if sparse else 0)
        long = min(long, self.bounds.longest or long)
        short, beside = self.bounds.shortest, self.step.tokens_beside
        kinds = [
            [Case(n, long + beside, beside) for n in _MEMORY_SIZES],
            [Case(max(1, long // short) * n, short + beside, beside) for n in _MEMORY_SIZES],
        ]
        cases = list(dict.fromkeys(case for found in kinds for case in found))
        self._compile(cases[: self._workers])
        self._require_time(0)
        self._compile(cases)
        bytes_ = {case: self._bytes(case) for case in cases}
        model = fit_memory(
            [c.rows for c in cases], [c.tokens for c in cases], [bytes_[c] for c in cases]
        )
        limit, margin = device_memory(self.bounds.memory), self.bounds.margin
        finding = MemoryFinding(limit, list(bytes_.items()), model, margin, short + beside)
        if finding.m_mem < finding.shortest:
            raise InputError(
                f"{limit / 1e9:.1f} GB hold {finding.m_mem} tokens, fewer than the shortest "
                f"sequence, {finding.shortest}; give more memory or a smaller --shortest"
            )
        return finding

    def measure(self, m_mem: int) -> Iterator[Outcome]:
        """Times the cases of the grid within the bounds, in order of increasing tokens.

        Raises:
          InputError: the time is too short for a fit.
        """
        longest, beside = self._longest(m_mem), self.step.tokens_beside
        waiting = grid(self.bounds.shortest, longest, m_mem, beside)
        for outcome in self._measure(waiting, self.bounds.seconds):
            if outcome.seconds is not None:
                self._points.append(outcome.point())
            elif outcome.note == _NO_TIME and len(self._points) < LEAST_POINTS:
                self._require_time(2 * self.bounds.seconds)
            yield outcome

    def _require_time(self, least: float) -> None:
        """Refuses bounds of fewer seconds than this, or than a fit takes."""
        # Later programs are larger, and run.
        compiling = 2 * -(-LEAST_POINTS // self._workers) * self._compile_seconds
        if (least := math.ceil(max(least, compiling))) > self.bounds.seconds:
            raise InputError(
                f"alload calibrate: --seconds is {self.bounds.seconds:g}, but a program takes "
                f"{self._compile_seconds:.0f} s to compile here, and a fit needs {LEAST_POINTS}; "
                f"give at least {least}"
            )

    def measure_sparse(self, m_mem: int) -> Iterator[Outcome]:
        """Times steps whose layers all have sparse attention, for each of `DENSITIES`.

        They take half as much time as the grid at most.
        """
        sparse = self.step.model.sparse_attention
        if sparse is None:
            return
        shortest = self.bounds.shortest
        waiting = sparse_cases(shortest, self._longest(m_mem), sparse.min_tokens)
        for density in DENSITIES if waiting else ():
            model = with_density(self.step.model, density)
            self.step.use(self.step.spec._replace(model=model))
            self._prepare()
            for outcome in self._measure(waiting, self.bounds.seconds / 2 / len(DENSITIES)):
                yield replace(outcome, density=density)

    def packed_ratio(self, outcomes: Sequence[Outcome]) -> float | None:
        """Seconds of packed rows over those of batches of the same samples.

        None where this device packs rows anyway or cannot, no case has several rows, or they do not
        fit. The case is the measured one with most tokens, which is timed anew in both layouts.
        """
        step, model = self.step, self.step.model
        several = [each.case for each in outcomes if each.seconds and each.case.rows > 1]
        reason = family_of(model).packing_unsupported_reason(model)
        if reason or not packed_unsupported_reason() or not several:
            return None
        case = max(several, key=lambda each: each.tokens)
        _, frames, height, width = latents = case.latents(model.patch_size)
        stride = Geometry().vae_stride  # that of random samples
        size = (frames - 1) * stride[0] + 1, height * stride[1], width * stride[2]
        pixels = np.tile(size, (case.rows, 1))
        samples = Samples(pixels, np.full(len(pixels), case.seq_len))
        planning = PlanningConfig(policy="first_fit", ranks_mode="synchronous", m_mem=case.tokens)
        plan = make_plan(planning, samples, 1, 0)
        with TemporaryDirectory() as place:
            write_random_store(Path(place) / "data", samples, model)
            source = open_source(f"{place}/data")
            conditions = conditions_for(model, source.manifest)
            collation = collation_for(plan, source.manifest, model, conditions)
            (packed,) = Collator(source, frozenset([0]), collation)(plan.step(0)).batches
        found = []
        try:
            for batch in (step.batch(latents), packed):
                placed = jax.block_until_ready(jax.tree.map(jnp.asarray, batch))
                program = step.compile_for(placed)
                seconds = [step.run(program, placed) for _ in range(4)]
                found.append(statistics.median(seconds[1:]))
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            step.renew()
            return None
        return found[1] / found[0]

    def _longest(self, m_mem: int) -> int:
        """Most tokens of latents in a row."""
        most = m_mem - self.step.tokens_beside
        return min(self.bounds.longest or LONGEST, most - most % self.bounds.shortest)

    def _measure(self, waiting: list[Case], seconds: float) -> Iterator[Outcome]:
        """Times cases, as many as the time allows, by what the grid has taken so far."""
        deadline = time.perf_counter() + seconds
        # A few at a time because XLA compiles one program on several cores already.
        for begin in range(0, len(waiting), self._workers):
            # Of the time for all programs that a fit lacks, or else for the next.
            lacking = max(self._workers, LEAST_POINTS - len(self._points))
            new = sum(case not in self._programs for case in waiting[begin : begin + lacking])
            left = deadline - time.perf_counter()
            left -= -(-new // self._workers) * self._compile_seconds
            chosen, together = [], waiting[begin : begin + self._workers]
            for case in together:
                step = _expected(self._points, case)
                if (needed := step * (1 + _repeats(step)) if step else 0.0) <= left:
                    left -= needed
                    chosen.append(case)
            self._compile(chosen)
            yield from map(self._time, chosen)
            yield from (Outcome(each, note=_NO_TIME) for each in together if each not in chosen)

    def _compile(self, cases: Sequence[Case]) -> None:
        """Compiles missing programs in parallel; a case that runs out of memory gets None."""

        def compiled(case: Case) -> Compiled | None:
            try:
                return self.step.compile(case.latents(self.step.model.patch_size))
            except jax.errors.JaxRuntimeError as error:
                if not out_of_memory(error):
                    raise
                return None

        missing = [case for case in cases if case not in self._programs]
        begin = time.perf_counter()
        with ThreadPoolExecutor(self._workers) as pool:
            self._programs.update(zip(missing, pool.map(compiled, missing), strict=True))
        if missing:
            rounds, seconds = -(-len(missing) // self._workers), time.perf_counter() - begin
            self._compile_seconds = seconds / rounds
            self._compiled += len(missing)
            self._all_seconds += seconds

    @property
    def program_seconds(self) -> float | None:
        """Seconds for each program, where several are compiled at once; None before any."""
        return self._all_seconds / self._compiled if self._compiled else None

    def _bytes(self, case: Case) -> int:
        """Peak bytes in use during a step, according to its compiled programs."""
        latents = case.latents(self.step.model.patch_size)
        batch = sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self.step.batch_shape(latents))
        )
        program = self._programs[case]
        if program is None:
            raise InputError(f"{case}: does not fit the device; use a larger one or model.remat")
        # Outputs need no memory of their own: they reuse donated arguments.
        found = program.memory_analysis()
        assert found is not None
        return self._resident + batch + max(found.temp_size_in_bytes, self._update_bytes)

    def _time(self, case: Case) -> Outcome:
        """Runs a case, unless it cannot fit."""
        program = self._programs[case]
        if program is None:
            return Outcome(case, note="out of memory when compiled")
        bytes_, limit = self._bytes(case), device_memory(self.bounds.memory)
        del self._programs[case]
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


def _repeats(first: float) -> int:
    """Number of timed steps after a first step that took `first` seconds."""
    if first > _TIMED_SECONDS:
        return 3 if first < 8 else 1
    return max(3, min(15, int(_TIMED_SECONDS / first)))


def _expected(points: Sequence[Point], case: Case) -> float:
    """Expected seconds of a step, rather an overestimate; 0 without points so far."""
    if not points:
        return 0.0
    if len(points) >= 6:
        return float(bucketed_cost(fit_quadratic(points), case.rows, case.seq_len))  # type: ignore[arg-type]
    last = points[-1]
    return last.seconds * max(1.0, case.tokens * case.seq_len / (last.tokens * last.seq_len))


_MEMORY, _DEFAULT_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"
BEYOND = 1.1
"""Tokens of the step that should fail, relative to those that fill the memory completely."""


def check_memory(costs: CostFile) -> Json:
    """Runs one step of M_mem tokens and one of `BEYOND` · M_mem / (1 − margin).

    Rows have the shortest length, with which M_mem tokens use the most memory.

    Args:
      costs: the cost model as `alload calibrate` writes it.

    Returns:
      The cases "within" and "beyond": tokens, whether the step ran, the allocator's peak in bytes
      (None on CPUs), the predicted bytes, and their relative error.

    Raises:
      InputError: the cost model was not measured.
    """
    if not (costs.details and costs.memory and costs.m_mem and costs.model):
        raise InputError("memory check: the cost model was not measured; run alload calibrate")
    memory, fields = costs.details["memory"], dict(costs.model)
    seq_len, beside = memory["shortest"], memory.get("beside", 0)
    shared = {"condition_tokens": fields.pop("condition_tokens", 1), "model": fields}
    # As training has it: the calibration counts with the memory that JAX takes then.
    share = {_MEMORY: os.environ.get(_MEMORY, _DEFAULT_MEMORY)}
    beyond = BEYOND * costs.m_mem / (1 - costs.details["margin"])
    found = {}
    for name, rows in (
        ("within", max(1, costs.m_mem // seq_len)),
        ("beyond", -(-int(beyond) // seq_len)),
    ):
        case = Case(rows, seq_len, beside)
        latents = case.latents(tuple(fields["patch_size"]))[1:]
        settings = shared | {"batch": rows, "latents": latents, "warmup": 0, "steps": 1}
        ran = measured("alload_jax.bench.step_process", settings, share)
        predicted, peak = costs.memory.bytes_of(case.tokens, rows), ran.get("peak_bytes")
        found[name] = {
            "rows": rows,
            "seq_len": seq_len,
            "tokens": case.tokens,
            "ran": "error" not in ran,
            "error": ran.get("error"),
            "seconds_with_first_run": ran.get("seconds"),
            "predicted_bytes": predicted,
            "peak_bytes": peak,
            "relative_error": predicted / peak - 1 if peak else None,
        }
    return found
