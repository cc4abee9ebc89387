"""Measures what a device does: the time of programs and of their kernels, clock and power."""

import contextlib
import itertools
import math
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from alload_jax.errors import InputError
from alload_jax.files import Json

_FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw.instant", "power.limit")
_MILLISECONDS = 50
"""Between samples."""
_PATIENCE = 2.0
"""Seconds that nvidia-smi has to end."""


@contextlib.contextmanager
def sampling() -> Iterator[list[str]]:
    """Samples the first GPU that JAX uses, from some 0.1 s after the start on.

    GPUs are numbered as nvidia-smi does it, which on a machine with GPUs of several kinds may
    differ from CUDA's order.

    Yields:
      A list that holds what nvidia-smi printed after the `with`, for `load_of`.
    """
    lines: list[str] = []
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    command += ["-i", device, "-lms", str(_MILLISECONDS)]
    given: Json = {"text": True, "encoding": "utf-8", "errors": "replace"}
    given |= {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = None
    if device and jax.default_backend() == "gpu":
        with contextlib.suppress(OSError):  # no nvidia-smi here
            process = subprocess.Popen(command, **given)
    if process is None:
        yield lines
        return
    output = process.stdout
    assert output is not None

    def read() -> None:
        with output:
            lines.extend(output)

    # Through a pipe, so that nvidia-smi ends where this process is killed.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        # One that hangs in the driver is left alone, as its measurement is done.
        for end in (process.terminate, process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
                break
        reader.join(_PATIENCE)


def load_of(lines: Iterable[str]) -> Json | None:
    """Medians over what nvidia-smi printed; None if no line is whole and has all values.

    Returns:
      `sm_mhz`, the clock of the multiprocessors, and `most_sm_mhz`, the highest that they have;
      `watts` that the GPU takes, and `most_watts`, its limit, at which the clock falls; `samples`,
      how many there were.
    """
    samples = []
    for line in lines:
        try:
            values = tuple(map(float, line.split(",")))
        except ValueError:
            continue  # "[N/A]"
        # The last line ends anywhere where nvidia-smi was ended within it.
        whole = line.endswith("\n") and len(values) == len(_FIELDS)
        if whole and all(map(math.isfinite, values)):
            samples.append(values)
    if not samples:
        return None
    medians = map(statistics.median, zip(*samples, strict=True))
    names = ("sm_mhz", "most_sm_mhz", "watts", "most_watts")
    return dict(zip(names, medians, strict=True)) | {"samples": len(samples)}


_COPIED_BYTES = 1 << 32
_CALLS = 20
_ATTEMPTS = 3


class DeviceTime(NamedTuple):
    """Device time of one call, in µs, the sum of its kernels.

    Attributes:
      us: median over iterations, each the mean of its calls.
      us_low: 10th percentile.
      us_high: 90th percentile.
      kernels: (name, µs a call) of each kernel, where known.
    """

    us: float
    us_low: float
    us_high: float
    kernels: tuple[tuple[str, float], ...]


def require_gpu() -> None:
    """Raises an InputError where there is no GPU to measure."""
    if jax.default_backend() != "gpu":
        raise InputError(
            f"alload bench: the backend is {jax.default_backend()!r}; kernels are measured on a "
            "GPU: install the extra cuda12 or cuda13 on a machine that has one"
        )


Sets = Sequence[tuple[object, ...]]
"""Sets of arguments, to be taken in turn."""


def rotating(function: Callable[..., object], sets: Sets) -> Compiled:
    """Compiles one program that calls a function on each set of arguments in turn.

    The sets together should be larger than the L2 cache. Each call waits for the one before it,
    so that XLA fuses none of them.
    """

    def calls(sets: Sets) -> list[object]:
        results: list[object] = []
        for arguments in sets:
            if results:
                results[-1], arguments = jax.lax.optimization_barrier((results[-1], arguments))
            results.append(function(*arguments))
        return results

    return jax.jit(calls).lower(sets).compile()


def device_time(program: Compiled, sets: Sets, iterations: int = 10) -> DeviceTime:
    """Runs what `rotating` compiled, `iterations` times over all sets.

    Raises:
      InputError: there is no GPU, or CUPTI shows no kernels (another profiler may hold it).
    """
    from jax.experimental.mosaic.gpu import profiler

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            cupti = profiler.Cupti()
            measured = cupti.measure(program, aggregate=False, iterations=iterations)(sets)[1]
            break
        except RuntimeError as error:
            # Now and then CUPTI's record lacks a kernel.
            if "not divisible" not in str(error) or attempt == _ATTEMPTS:
                raise
    if not measured:
        raise InputError("alload bench: CUPTI shows no kernels; is another profiler running?")
    calls = 1e3 / len(sets)
    totals = [calls * sum(ms for _, ms in iteration) for iteration in measured]
    kernels: dict[str, float] = dict.fromkeys((name for name, _ in measured[0]), 0.0)
    for name, ms in itertools.chain.from_iterable(measured):
        kernels[name] += calls * ms / len(measured)
    tenths = statistics.quantiles(totals, n=10)
    return DeviceTime(statistics.median(totals), tenths[0], tenths[-1], tuple(kernels.items()))


def call_time(function: Callable[..., object], sets: Sets) -> DeviceTime:
    """Device time of a function that is compiled to run on each set of arguments in turn."""
    return device_time(rotating(function, sets), sets)


def pass_times(
    function: Callable[..., object], inputs: Sets, cotangents: Sequence[object]
) -> Iterator[tuple[Literal["forward", "backward"], DeviceTime]]:
    """Times of the forward, and of the backward from what the forward keeps.

    Args:
      function: of three arrays that are differentiated, such as queries, keys and values, and of
        others. All are arguments: XLA would compute beforehand what depends on constants alone.
      inputs: sets of arguments.
      cotangents: of the output, one for each set.
    """
    yield "forward", call_time(function, inputs)

    @jax.jit
    def linearise(arrays: tuple[jax.Array, ...], others: tuple[object, ...]) -> Any:
        return jax.vjp(lambda *arrays: function(*arrays, *others), *arrays)[1]

    pulls = [linearise(each[:3], each[3:]) for each in inputs]
    kept = list(zip(pulls, cotangents, strict=True))
    yield "backward", call_time(lambda pull, cotangent: pull(cotangent), kept)


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of large copies from the device to itself."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", _COPIED_BYTES * 8)
    size = min(_COPIED_BYTES, limit // 8) // 4 * 4
    source = jax.block_until_ready(jnp.ones((size // 4,), jnp.float32))
    return 2 * size / repeated_seconds(jax.jit(jnp.copy), source)


def repeated_seconds(function: Callable[..., object], *arguments: object) -> float:
    """Wall-clock seconds of each of many calls in a row: the median of nine measurements."""

    def seconds(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        return time.perf_counter() - begin

    seconds(2)
    # The difference leaves out what starting and waiting cost.
    each = [(seconds(2 * _CALLS) - seconds(_CALLS)) / _CALLS for _ in range(9)]
    return statistics.median(each)
