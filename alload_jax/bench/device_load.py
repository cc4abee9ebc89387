"""Samples the clock and the power of the GPU while something runs on it."""

import contextlib
import math
import os
import statistics
import subprocess
import threading
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

import jax

_FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw.instant", "power.limit")
_MILLISECONDS = 50
"""Between samples."""
_PATIENCE = 2.0
"""Seconds that nvidia-smi has to end."""


class DeviceLoad(NamedTuple):
    """Medians over samples of one GPU.

    Attributes:
      sm_mhz: clock of the multiprocessors.
      most_sm_mhz: the highest that they have.
      watts: power that the GPU takes.
      most_watts: its limit; at the limit, the clock falls.
      samples: how many there were.
    """

    sm_mhz: float
    most_sm_mhz: float
    watts: float
    most_watts: float
    samples: int


class Sampled:
    """Holds the `DeviceLoad` after the `with`; None where nvidia-smi said nothing."""

    load: DeviceLoad | None = None


@contextlib.contextmanager
def sampling() -> Iterator[Sampled]:
    """Samples the first GPU that JAX uses, from some 0.1 s after the start on.

    GPUs are numbered as nvidia-smi does it, which on a machine with GPUs of several kinds may
    differ from CUDA's order.
    """
    found, lines = Sampled(), list[str]()
    process = _started()
    if process is None:
        yield found
        return
    assert process.stdout is not None
    # Through a pipe, so that nvidia-smi ends where this process is killed.
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        yield found
    finally:
        _end(process)
        reader.join(_PATIENCE)
        found.load = load_of(lines)


def load_of(lines: Iterable[str]) -> DeviceLoad | None:
    """Of what nvidia-smi printed; None if no line is whole and has all values."""
    samples = [values for line in lines if (values := _values(line)) is not None]
    if not samples:
        return None
    clock, most, watts, limit = map(statistics.median, zip(*samples, strict=True))
    return DeviceLoad(clock, most, watts, limit, len(samples))


def _started() -> subprocess.Popen[str] | None:
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if jax.default_backend() != "gpu" or not device:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    command += ["-i", device, "-lms", str(_MILLISECONDS)]
    try:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError:
        return None  # no nvidia-smi here


def _read(output: IO[str], lines: list[str]) -> None:
    with output:
        lines.extend(output)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends it; one that hangs in the driver is left alone, as its measurement is done."""
    for end in (process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
            return


def _values(line: str) -> tuple[float, ...] | None:
    """None for a line with "[N/A]", and for the last one where nvidia-smi was ended within it."""
    try:
        values = tuple(map(float, line.split(",")))
    except ValueError:
        return None
    whole = line.endswith("\n") and len(values) == len(_FIELDS)
    return values if whole and all(map(math.isfinite, values)) else None
