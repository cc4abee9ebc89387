"""Samples the clock and the power of the GPU while something runs on it."""

import contextlib
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

_FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit")
_MILLISECONDS = 50
"""Between samples."""


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
    """Samples the first GPU that this process may use, from some 0.1 s after the start on."""
    found = Sampled()
    with tempfile.TemporaryFile("w+") as told:
        try:
            process = subprocess.Popen(_command(), stdout=told, stderr=subprocess.DEVNULL)
        except OSError:
            yield found  # no nvidia-smi here
            return
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
        told.seek(0)
        found.load = load_of(told.read())


def load_of(text: str) -> DeviceLoad | None:
    """Of lines of nvidia-smi; None if no line has all values."""
    samples = [values for line in text.splitlines() if (values := _values(line)) is not None]
    if not samples:
        return None
    clock, most, watts, limit = map(statistics.median, zip(*samples, strict=True))
    return DeviceLoad(clock, most, watts, limit, len(samples))


def _command() -> list[str]:
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = f"--query-gpu={','.join(_FIELDS)}"
    return [
        "nvidia-smi",
        query,
        "--format=csv,noheader,nounits",
        "-i",
        device,
        "-lms",
        f"{_MILLISECONDS}",
    ]


def _values(line: str) -> tuple[float, ...] | None:
    """None for a line with "[N/A]", and for the last one where the process was ended within it."""
    try:
        values = tuple(map(float, line.split(",")))
    except ValueError:
        return None
    return values if len(values) == len(_FIELDS) else None
