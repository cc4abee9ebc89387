"""Traces of steps: which kernel runs when on each device, and whose the time is.

Kernels in CUDA graphs are not shown: XLA_FLAGS=--xla_gpu_enable_command_buffer= avoids graphs.
"""

import gzip
import heapq
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData, ProfilePlane

_STEP = "alload step"
_DEVICE, _HOST = "/device:GPU:", "/host:CPU"
"""Begin the names of planes in a profile."""
_STREAM = "Stream"
"""Begins the names of a GPU's lines of kernels."""
_COLLECTIVE = re.compile(
    "nccl|all.?reduce|all.?gather|all.?to.?all|reduce.?scatter|permute.?start|multi.?gpu", re.I
)
"""Names of NCCL's kernels and of XLA's own collectives for small data."""
_NUMBER = re.compile(r"\d+")


class Operation(NamedTuple):
    """What a kernel was launched for.

    Attributes:
      program: name of the compiled program; "" if the profiler does not say it.
      instruction: name of its instruction; "" if unknown.
      kernel: name of the kernel.
    """

    program: str
    instruction: str
    kernel: str


class Span(NamedTuple):
    """One run of a kernel, in ns."""

    begin: float
    end: float
    operation: Operation


def recorded(
    runs: Sequence[Callable[[], object]], keep: Path | None = None
) -> tuple[list[float], ProfileData]:
    """Runs steps under JAX's profiler.

    Args:
      runs: functions that run one step each and return when it has finished.
      keep: a file for the profile in the format of XSpace, compressed by gzip; None for none.

    Returns:
      Wall-clock seconds of the steps, and the profile of them.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for run in runs:
                with jax.profiler.TraceAnnotation(_STEP):
                    begin = time.perf_counter()
                    run()
                    seconds.append(time.perf_counter() - begin)
        finally:
            jax.profiler.stop_trace()
        (record,) = Path(folder).rglob("*.xplane.pb")
        if keep is not None:
            keep.write_bytes(gzip.compress(record.read_bytes()))
        return seconds, ProfileData.from_file(str(record))


def step_windows(profile: ProfileData) -> list[tuple[float, float]]:
    """(begin, end) of each step, in ns."""
    return sorted(
        (event.start_ns, event.end_ns)
        for plane in profile.planes
        if not plane.name.startswith(_DEVICE)
        for line in plane.lines
        for event in line.events
        if event.name == _STEP
    )


def spans_of_devices(
    profile: ProfileData, containers: Mapping[str, Collection[str]] | None = None
) -> list[list[Span]]:
    """The kernels of each GPU, in the order of their numbers; XLA's of the CPU without a GPU.

    Args:
      profile: of `recorded`.
      containers: by program, names of instructions to leave out, since they contain others.
    """
    planes = [plane for plane in profile.planes if plane.name.startswith(_DEVICE)]
    on_host = not planes
    if on_host:
        planes = [plane for plane in profile.planes if plane.name == _HOST]
    planes.sort(key=lambda plane: [int(n) for n in _NUMBER.findall(plane.name)])

    def spans(plane: ProfilePlane) -> Iterator[Span]:
        for line in plane.lines:
            if not (on_host or (line.name or "").startswith(_STREAM)):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if on_host and "hlo_op" not in stats:
                    continue
                # A number may follow a module's name.
                program = str(stats.get("hlo_module", "")).partition("(")[0]
                name = str(stats.get("hlo_op", ""))
                if name not in (containers or {}).get(program, ()):
                    operation = Operation(program, name, event.name)
                    yield Span(event.start_ns, event.end_ns, operation)

    return [list(spans(plane)) for plane in planes]


def is_collective(operation: Operation) -> bool:
    """Whether a kernel communicates between devices."""
    return bool(_COLLECTIVE.search(operation.kernel))


def divide(spans: Sequence[Span], begin: float, end: float) -> tuple[list[float], float]:
    """Divides the time from `begin` to `end` among spans.

    Returns:
      The ns of each span, and those in which there is none. They add up to end − begin.
    """
    order = sorted(range(len(spans)), key=lambda number: spans[number].begin)
    owned, idle, now = [0.0] * len(spans), 0.0, begin
    active: list[tuple[float, int]] = []
    waiting = iter([*order, None])
    following = next(waiting)
    while now < end:
        while following is not None and spans[following].begin <= now:
            heapq.heappush(active, (spans[following].end, following))
            following = next(waiting)
        while active and active[0][0] <= now:
            heapq.heappop(active)
        ends = [active[0][0]] if active else []
        begins = [] if following is None else [spans[following].begin]
        until = min([*ends, *begins, end])
        if active:
            running = [number for _, number in active]
            # Those of kernels that compute, or else of collectives.
            owners = [n for n in running if not is_collective(spans[n].operation)] or running
            for number in owners:
                owned[number] += (until - now) / len(owners)
        else:
            idle += until - now
        now = until
    return owned, idle


class Traced(NamedTuple):
    """Seconds of steps.

    Attributes:
      seconds: [steps] wall-clock time from dispatch until the results are ready.
      busy: [steps][devices] time in which a kernel other than a collective runs; None if the
        profiler shows no GPU.
      exposed: [steps][devices] time in which only collectives run: communication that does not
        overlap computation, or waiting for other devices.
    """

    seconds: list[float]
    busy: list[list[float]] | None
    exposed: list[list[float]] | None


def traced(runs: Sequence[Callable[[], object]]) -> Traced:
    """Runs steps under JAX's profiler.

    Args:
      runs: functions that run one step each and return when it has finished.
    """
    seconds, profile = recorded(runs)
    return Traced(seconds, *(device_seconds(profile) or (None, None)))


def device_seconds(profile: ProfileData) -> tuple[list[list[float]], list[list[float]]] | None:
    """(`busy`, `exposed`) of `Traced`; None if the profile has no GPU."""
    if not any(plane.name.startswith(_DEVICE) for plane in profile.planes):
        return None
    devices = spans_of_devices(profile)
    busy, exposed = [], []
    for begin, end in step_windows(profile):
        times = []
        for spans in devices:
            inside = [each for each in spans if each.begin < end and each.end > begin]
            times.append([0.0, 0.0])
            for each, spent in zip(inside, divide(inside, begin, end)[0], strict=True):
                times[-1][is_collective(each.operation)] += spent / 1e9
        busy.append([computing for computing, _ in times])
        exposed.append([communicating for _, communicating in times])
    return busy, exposed


class Spent(NamedTuple):
    """Of one operation in one step, mean over steps and devices.

    Attributes:
      calls: runs of the kernel.
      seconds: time in which it alone is running, and its part of the time that it shares.
      running: seconds in which it runs, alone or not.
    """

    calls: float
    seconds: float
    running: float


class Timeline(NamedTuple):
    """Where a step's time goes, mean over steps and devices.

    Attributes:
      seconds: of a step, from dispatch until its results are ready.
      spent: by operation; with `idle` it adds up to `seconds`.
      idle: seconds in which no kernel runs.
      steps: number of traced steps.
      devices: number of devices.
    """

    seconds: float
    spent: Mapping[Operation, Spent]
    idle: float
    steps: int
    devices: int


def timeline(
    profile: ProfileData, containers: Mapping[str, Collection[str]] | None = None
) -> Timeline:
    """The timeline of a profile of `recorded`.

    Where kernels overlap, each has an equal part of the time; collectives have only time in which
    nothing else runs.

    Args:
      profile: of GPUs, or of XLA's operations on the CPU where there is no GPU.
      containers: by program, names of instructions to leave out, since they contain others.

    Raises:
      ValueError: the profile has no steps.
    """
    windows, devices = step_windows(profile), spans_of_devices(profile, containers)
    if not windows or not devices:
        raise ValueError("the profile has no steps; record it with `recorded`")
    calls: dict[Operation, float] = defaultdict(float)
    seconds: dict[Operation, float] = defaultdict(float)
    running: dict[Operation, float] = defaultdict(float)
    idle, count = 0.0, len(windows) * len(devices)
    for spans in devices:
        for begin, end in windows:
            inside = [each for each in spans if each.begin < end and each.end > begin]
            owned, free = divide(inside, begin, end)
            idle += free
            for each, spent in zip(inside, owned, strict=True):
                calls[each.operation] += 1
                seconds[each.operation] += spent / 1e9
                running[each.operation] += (min(each.end, end) - max(each.begin, begin)) / 1e9
    return Timeline(
        sum(end - begin for begin, end in windows) / 1e9 / len(windows),
        {
            each: Spent(calls[each] / count, spent / count, running[each] / count)
            for each, spent in seconds.items()
        },
        idle / 1e9 / count,
        len(windows),
        len(devices),
    )
