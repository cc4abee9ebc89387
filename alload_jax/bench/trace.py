"""Traces of steps: which kernel runs when on each device, and whose the time is.

Kernels in CUDA graphs are not shown: XLA_FLAGS=--xla_gpu_enable_command_buffer= avoids graphs.
"""

import gzip
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, pairwise
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
    beginning: dict[float, list[int]] = defaultdict(list)
    for number, each in enumerate(spans):
        beginning[max(each.begin, begin)].append(number)
    times = {begin, end, *beginning, *(each.end for each in spans)}
    owned, idle = [0.0] * len(spans), 0.0
    running: list[int] = []
    for now, until in pairwise(sorted(each for each in times if begin <= each <= end)):
        running = [n for n in (*running, *beginning[now]) if spans[n].end > now]
        # Those of kernels that compute, or else of collectives.
        owners = [n for n in running if not is_collective(spans[n].operation)] or running
        for number in owners:
            owned[number] += (until - now) / len(owners)
        idle += 0 if owners else until - now
    return owned, idle


Divided = list[tuple[list[tuple[Span, float]], float]]
"""For each device its spans in a step, with the seconds that are theirs, and the seconds without
any."""


def divided_steps(
    profile: ProfileData, containers: Mapping[str, Collection[str]] | None = None
) -> list[Divided]:
    """The time of each step of a profile of `recorded`, divided; see `spans_of_devices`."""
    devices, found = spans_of_devices(profile, containers), []
    for begin, end in step_windows(profile):
        step: Divided = []
        for spans in devices:
            inside = [
                each._replace(begin=max(each.begin, begin), end=min(each.end, end))
                for each in spans
                if each.begin < end and each.end > begin
            ]
            owned, idle = divide(inside, begin, end)
            step.append(([(s, ns / 1e9) for s, ns in zip(inside, owned, strict=True)], idle / 1e9))
        found.append(step)
    return found


def device_shares(profile: ProfileData) -> dict[str, list[float] | float]:
    """How GPUs spend the time from the first kernel of a trace to the last; {} without GPUs.

    Returns:
      `busy`, the share of each device in which a kernel other than a collective runs; `exposed`,
      that in which only collectives run; and `idle`, one less the mean of `busy`.
    """
    devices = spans_of_devices(profile)
    if not any(plane.name.startswith(_DEVICE) for plane in profile.planes) or not all(devices):
        return {}
    begin = min(each.begin for spans in devices for each in spans)
    end = max(each.end for spans in devices for each in spans)
    busy, exposed = [], []
    for spans in devices:
        owned, idle = divide(spans, begin, end)
        computed = sum(
            ns for each, ns in zip(spans, owned, strict=True) if not is_collective(each.operation)
        )
        busy.append(computed / (end - begin))
        exposed.append(1 - (computed + idle) / (end - begin))
    return {"busy": busy, "exposed": exposed, "idle": 1 - sum(busy) / len(busy)}


def time_of_operations(steps: Sequence[Divided]) -> dict[Operation, dict[str, float]]:
    """The time of each operation in `divided_steps`, mean over steps and devices.

    Where kernels overlap, each has an equal part of the time; collectives have only time in which
    nothing else runs.

    Returns:
      `calls`, runs of the kernel; `seconds` in which it alone is running, and its part of the time
      that it shares; `running`, seconds in which it runs, alone or not.
    """
    sums: dict[Operation, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for device, _ in chain.from_iterable(steps):
        for each, seconds in device:
            for place, value in enumerate((1, seconds, (each.end - each.begin) / 1e9)):
                sums[each.operation][place] += value
    count, names = sum(map(len, steps)), ("calls", "seconds", "running")
    return {
        each: {name: value / count for name, value in zip(names, total, strict=True)}
        for each, total in sums.items()
    }
