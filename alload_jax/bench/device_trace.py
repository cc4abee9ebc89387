"""Measures when each GPU of this host computes and when it only communicates."""

import gzip
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
DEVICE = "/device:GPU:"
"""Begins the names of the planes of GPUs in a profile."""
STREAM = "Stream"
"""Begins the names of their lines of kernels."""
COLLECTIVE = re.compile(
    "nccl|all.?reduce|all.?gather|all.?to.?all|reduce.?scatter|permute.?start|multi.?gpu", re.I
)
"""Names of NCCL's kernels and of XLA's own collectives for small data."""


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


def traced(runs: Sequence[Callable[[], Any]]) -> Traced:
    """Runs steps under JAX's profiler.

    Args:
      runs: functions that run one step each and return when it has finished.
    """
    seconds, profile = recorded(runs)
    found = device_seconds(profile)
    return Traced(seconds, *(found or (None, None)))


def kernel_seconds(run: Callable[[], Any]) -> tuple[float, dict[tuple[str, str], float]]:
    """Runs one step under JAX's profiler.

    Kernels in CUDA graphs are not shown: XLA_FLAGS=--xla_gpu_enable_command_buffer= avoids graphs.

    Args:
      run: runs the step and returns when it has finished.

    Returns:
      Its wall-clock seconds, and the seconds of each kernel, all its calls together, by its name
      and that of its operation in the compiled program (empty if the profiler does not say it).
    """
    (seconds,), profile = recorded([run])
    return seconds, seconds_by_kernel(profile)


def seconds_by_kernel(profile: ProfileData) -> dict[tuple[str, str], float]:
    """The seconds of `kernel_seconds`, of all devices together."""
    found: dict[tuple[str, str], float] = {}
    for plane in _device_planes(profile):
        for line in plane.lines:
            if not line.name.startswith(STREAM):
                continue
            for event in line.events:
                operation = next((str(v) for k, v in event.stats if k == "hlo_op"), "")
                key = (event.name, operation)
                found[key] = found.get(key, 0.0) + event.duration_ns / 1e9
    return found


def recorded(
    runs: Sequence[Callable[[], Any]], keep: Path | None = None
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


def device_seconds(profile: ProfileData) -> tuple[list[list[float]], list[list[float]]] | None:
    """(`busy`, `exposed`) of `Traced`; None if the profile has no GPU."""
    windows = step_windows(profile)
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


def step_windows(profile: ProfileData) -> list[tuple[float, float]]:
    """(begin, end) of each step, in ns."""
    return sorted(
        (event.start_ns, event.end_ns)
        for plane in profile.planes
        if not plane.name.startswith(DEVICE)
        for line in plane.lines
        for event in line.events
        if event.name == _STEP
    )


def _device_planes(profile: ProfileData) -> list[Any]:
    planes = [plane for plane in profile.planes if plane.name.startswith(DEVICE)]
    return sorted(planes, key=lambda plane: int(plane.name.removeprefix(DEVICE).split()[0]))


def _kernels(plane: Any) -> tuple[np.ndarray, np.ndarray]:
    """(begin, end) in ns of a device's computing kernels [n, 2] and of its collectives [m, 2]."""
    spans: tuple[list[Any], list[Any]] = [], []
    for line in plane.lines:
        if line.name.startswith(STREAM):
            for event in line.events:
                spans[bool(COLLECTIVE.search(event.name))].append((event.start_ns, event.end_ns))
    computing, communicating = (np.array(found, np.float64).reshape(-1, 2) for found in spans)
    return computing, communicating


def _covered(spans: np.ndarray, begin: float, end: float) -> float:
    """Seconds between `begin` and `end` covered by at least one span [n, 2]; arguments in ns."""
    begins, ends = np.clip(spans[np.argsort(spans[:, 0])], begin, end).T
    before = np.maximum.accumulate(np.concatenate([[begin], ends]))[:-1]
    return float(np.maximum(ends - np.maximum(begins, before), 0).sum() / 1e9)
