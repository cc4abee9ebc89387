"""When each GPU of this host computes and when it only communicates, by the profiler's record."""

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData

_STEP = "alload step"
_DEVICE = "/device:GPU:"
_STREAM = "Stream"
_COLLECTIVE = re.compile(
    "nccl|all.?reduce|all.?gather|all.?to.?all|reduce.?scatter|permute.?start|multi.?gpu", re.I
)
"""NCCL's kernels, and XLA's own for little data, which wait for the other devices too."""


class Traced(NamedTuple):
    """Seconds of steps.

    Attributes:
      seconds: [steps] by the host's clock, each from dispatch until its results are there.
      busy: [steps][devices] in which some kernel runs that is no collective; None where the
        profiler shows no GPU.
      exposed: [steps][devices] in which collectives alone run: moving data that no computation
        hides, or waiting for other devices.
    """

    seconds: list[float]
    busy: list[list[float]] | None
    exposed: list[list[float]] | None


def traced(runs: Sequence[Callable[[], Any]]) -> Traced:
    """Runs steps under JAX's profiler.

    Args:
      runs: each runs a step and returns when it is done.
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
        profile = ProfileData.from_file(str(record))
    found = device_seconds(profile)
    return Traced(seconds, *(found or (None, None)))


def device_seconds(profile: ProfileData) -> tuple[list[list[float]], list[list[float]]] | None:
    """(`busy`, `exposed`) of `Traced`; None where the profile has no GPU."""
    windows = _windows(profile)
    devices = [_kernels(plane) for plane in _device_planes(profile)]
    if not devices:
        return None
    busy, exposed = [], []
    for begin, end in windows:
        computed = [_covered(computing, begin, end) for computing, _ in devices]
        occupied = [_covered(np.concatenate(kernels), begin, end) for kernels in devices]
        busy.append(computed)
        exposed.append([both - one for both, one in zip(occupied, computed, strict=True)])
    return busy, exposed


def _windows(profile: ProfileData) -> list[tuple[float, float]]:
    """(begin, end) of each step, ns."""
    return sorted(
        (event.start_ns, event.end_ns)
        for plane in profile.planes
        if not plane.name.startswith(_DEVICE)
        for line in plane.lines
        for event in line.events
        if event.name == _STEP
    )


def _device_planes(profile: ProfileData) -> list[Any]:
    planes = [plane for plane in profile.planes if plane.name.startswith(_DEVICE)]
    return sorted(planes, key=lambda plane: int(plane.name.removeprefix(_DEVICE).split()[0]))


def _kernels(plane: Any) -> tuple[np.ndarray, np.ndarray]:
    """[n, 2] (begin, end), ns, of a device's kernels that compute and of collectives."""
    spans: tuple[list[Any], list[Any]] = [], []
    for line in plane.lines:
        if line.name.startswith(_STREAM):
            for event in line.events:
                spans[bool(_COLLECTIVE.search(event.name))].append((event.start_ns, event.end_ns))
    computing, communicating = (np.array(found, np.float64).reshape(-1, 2) for found in spans)
    return computing, communicating


def _covered(spans: np.ndarray, begin: float, end: float) -> float:
    """Seconds from begin to end that at least one of the spans [n, 2] covers, all in ns."""
    begins, ends = np.clip(spans[np.argsort(spans[:, 0])], begin, end).T
    before = np.maximum.accumulate(np.concatenate([[begin], ends]))[:-1]
    return float(np.maximum(ends - np.maximum(begins, before), 0).sum() / 1e9)
