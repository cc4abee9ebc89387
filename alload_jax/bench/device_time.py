"""Time that the device spends, by CUPTI's record of kernels rather than the host's clock."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from alload_jax.errors import InputError

_COPIED_BYTES = 1 << 32
_CALLS = 20
_ATTEMPTS = 3


@dataclass(frozen=True)
class DeviceTime:
    """Device time of one call, in µs, the sum of its kernels.

    Attributes:
      median: over iterations, each the mean of its calls.
      low: 10th percentile.
      high: 90th percentile.
      kernels: (name, µs a call) of each kernel.
    """

    median: float
    low: float
    high: float
    kernels: tuple[tuple[str, float], ...]


def require_gpu() -> None:
    """Raises an InputError where there is no GPU to measure."""
    if jax.default_backend() != "gpu":
        raise InputError(
            f"alload bench: the backend is {jax.default_backend()!r}; kernels are measured on a "
            "GPU: install the extra cuda12 or cuda13 on a machine that has one"
        )


def rotating(function: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Any:
    """Compiles one program that calls a function on each set of arguments in turn.

    The sets together should be larger than the L2 cache. Each call waits for the one before it,
    so that XLA fuses none of them.
    """

    def calls(sets: Sequence[tuple[Any, ...]]) -> list[Any]:
        results: list[Any] = []
        for arguments in sets:
            if results:
                results[-1], arguments = jax.lax.optimization_barrier((results[-1], arguments))
            results.append(function(*arguments))
        return results

    return jax.jit(calls).lower(sets).compile()


def device_time(program: Any, sets: Sequence[tuple[Any, ...]], iterations: int = 10) -> DeviceTime:
    """Runs what `rotating` compiled, `iterations` times over all sets.

    Raises:
      InputError: there is no GPU, or CUPTI shows no kernels (another profiler may hold it).
    """
    measured = _measured(program, sets, iterations)
    if not measured:
        raise InputError("alload bench: CUPTI shows no kernels; is another profiler running?")
    calls = 1e3 / len(sets)
    totals = [calls * sum(ms for _, ms in iteration) for iteration in measured]
    kernels: dict[str, float] = dict.fromkeys((name for name, _ in measured[0]), 0.0)
    for name, ms in itertools.chain.from_iterable(measured):
        kernels[name] += calls * ms / len(measured)
    tenths = statistics.quantiles(totals, n=10)
    return DeviceTime(statistics.median(totals), tenths[0], tenths[-1], tuple(kernels.items()))


def _measured(program: Any, sets: Sequence[tuple[Any, ...]], iterations: int) -> Any:
    """(name, ms) of each kernel of each iteration."""
    from jax.experimental.mosaic.gpu import profiler

    left = _ATTEMPTS
    while True:
        left -= 1
        try:
            cupti = profiler.Cupti()
            return cupti.measure(program, aggregate=False, iterations=iterations)(sets)[1]
        except RuntimeError as error:
            # Now and then CUPTI's record lacks a kernel.
            if "not divisible" not in str(error) or not left:
                raise


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of large copies from the device to itself."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", _COPIED_BYTES * 8)
    size = min(_COPIED_BYTES, limit // 8) // 4 * 4
    source = jax.block_until_ready(jnp.ones((size // 4,), jnp.float32))
    return 2 * size / repeated_seconds(jax.jit(jnp.copy), source)


def repeated_seconds(function: Callable[..., Any], *arguments: Any) -> float:
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
