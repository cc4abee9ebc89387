"""Divides the time of steps among the kernels of a trace, so that every instant counts once."""

import heapq
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.profiler import ProfileData

from alload_jax.bench.device_trace import COLLECTIVE, DEVICE, STREAM, step_windows

_HOST = "/host:CPU"
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
    """The timeline of a profile of `device_trace.recorded`.

    Where kernels overlap, each has an equal part of the time; collectives have only time in which
    nothing else runs.

    Args:
      profile: of GPUs, or of XLA's operations on the CPU where there is no GPU.
      containers: by program, names of instructions to leave out, since they contain others.

    Raises:
      ValueError: the profile has no steps.
    """
    windows, devices = step_windows(profile), list(_devices(profile, containers or {}))
    if not windows or not devices:
        raise ValueError("the profile has no steps; record it with `device_trace.recorded`")
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
            owners = _owners(spans, [number for _, number in active])
            for number in owners:
                owned[number] += (until - now) / len(owners)
        else:
            idle += until - now
        now = until
    return owned, idle


def _owners(spans: Sequence[Span], active: Sequence[int]) -> Sequence[int]:
    """Those that time belongs to: kernels that compute, or else collectives."""
    computing = [number for number in active if not is_collective(spans[number].operation)]
    return computing or active


def is_collective(operation: Operation) -> bool:
    """Whether a kernel communicates between devices."""
    return bool(COLLECTIVE.search(operation.kernel))


def _devices(
    profile: ProfileData, containers: Mapping[str, Collection[str]]
) -> Iterator[list[Span]]:
    """The spans of each device, in the order of their numbers."""
    planes = [plane for plane in profile.planes if plane.name.startswith(DEVICE)]
    on_host = not planes
    if on_host:
        planes = [plane for plane in profile.planes if plane.name == _HOST]
    for plane in sorted(planes, key=lambda each: [int(n) for n in _NUMBER.findall(each.name)]):
        spans = []
        for line in plane.lines:
            if not (on_host or line.name.startswith(STREAM)):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if on_host and "hlo_op" not in stats:
                    continue
                # A number may follow a module's name.
                program = str(stats.get("hlo_module", "")).partition("(")[0]
                name = str(stats.get("hlo_op", ""))
                if name in containers.get(program, ()):
                    continue
                operation = Operation(program, name, event.name)
                spans.append(Span(event.start_ns, event.end_ns, operation))
        yield spans
