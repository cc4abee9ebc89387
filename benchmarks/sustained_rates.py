"""Times cuDNN's attention and matrix products in a short burst, and on a device that stays busy.

    python benchmarks/sustained_rates.py

A training step keeps the GPU busy for minutes, and the GPU lowers its clock to stay within its
limit of power. A roof of rates that were measured in a few milliseconds is then out of reach.
Each shape of attention is timed alone after a pause (`burst`), alone after two seconds of itself
(`alone`), and after two seconds of its forward, its backward and products in turn (`mixed`); the
product of two matrices of width 8192 likewise. `load` has the medians of the clock and of the power
in these two seconds.
"""

import math
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.bench.device import DeviceLoad, device_time, require_gpu, rotating, sampling
from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.errors import run_command
from alload_jax.files import Json

_WIDTH, _PRODUCTS = 8192, 8
"""Of the products, and how many run beside one attention's forward and backward."""
_BUSY, _PAUSE = 2.0, 1.0
_CALLS_IN_QUEUE = 4


class Shape(NamedTuple):
    """Of one call of attention."""

    rows: int
    queries: int
    keys: int
    heads: int = 12
    head_dim: int = 128


SHAPES = (
    Shape(42, 1560, 1560),
    Shape(42, 1560, 512),
    Shape(8, 4096, 4096),
    Shape(16, 2048, 512),
    Shape(1, 32_760, 32_760),
)


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """cuDNN's attention."""
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")


def forward(inputs: Any) -> jax.Array:
    """Of attention."""
    return attend(*inputs["attention"])


def backward(inputs: Any) -> Any:
    """Of attention."""
    return inputs["pull"](inputs["dout"])


def product(inputs: Any) -> jax.Array:
    """Of two matrices."""
    return jnp.matmul(*inputs["matrices"])


def mixed(inputs: Any) -> list[Any]:
    """Both passes and the products, each after the one before it."""
    results = []
    for function in (forward, backward, *(product,) * _PRODUCTS):
        results.append(function(inputs))
        results[-1], inputs = jax.lax.optimization_barrier((results[-1], inputs))
    return results


def make(shape: Shape) -> Json:
    """Random inputs of all functions."""
    keys = jax.random.split(jax.random.key(0), 6)
    rows, queries, kept, heads, dim = shape
    lengths = (queries, kept, kept, queries)
    query, key, value, dout = (
        jax.random.normal(each, (rows, length, heads, dim), jnp.bfloat16)
        for each, length in zip(keys[:4], lengths, strict=True)
    )
    matrices = [jax.random.normal(each, (_WIDTH, _WIDTH), jnp.bfloat16) for each in keys[4:]]
    pull = jax.jit(lambda *each: jax.vjp(attend, *each)[1])(query, key, value)
    return {"attention": (query, key, value), "dout": dout, "pull": pull, "matrices": matrices}


def keep_busy(program: Any, arguments: Any) -> DeviceLoad | None:
    """Runs a program for two seconds; what the device did in the meantime."""
    with sampling() as sampled:
        end = time.perf_counter() + _BUSY
        while time.perf_counter() < end:
            results = [program(arguments) for _ in range(_CALLS_IN_QUEUE)]
            jax.block_until_ready(results)
    return sampled.load


def kernels(program: Any, sets: Any) -> dict[str, float]:
    """Seconds of each kernel of a call."""
    return {name: us / 1e6 for name, us in device_time(program, sets).kernels}


def measured(shape: Shape) -> Iterator[Json]:
    """The rows of the result for a shape."""
    inputs = make(shape)
    sets = [(inputs,)]
    names: dict[str, set[str]] = {}
    programs = {each.__name__: rotating(each, sets) for each in (forward, backward, product, mixed)}
    for name in ("forward", "backward", "product"):
        program = programs[name]
        jax.block_until_ready(program(sets))
        time.sleep(_PAUSE)
        burst = kernels(program, sets)
        names[name] = set(burst)
        load = keep_busy(program, sets)
        alone = kernels(program, sets)
        yield _row(shape, name, "burst", sum(burst.values()), None)
        yield _row(shape, name, "alone", sum(alone.values()), load)
    load = keep_busy(programs["mixed"], sets)
    found = kernels(programs["mixed"], sets)
    attention = names["forward"] | names["backward"]
    for name in ("forward", "backward"):
        seconds = sum(found[each] for each in names[name])
        yield _row(shape, name, "mixed", seconds, load)
    rest = sum(seconds for each, seconds in found.items() if each not in attention)
    yield _row(shape, "product", "mixed", rest / _PRODUCTS, load)


def _row(shape: Shape, what: str, when: str, seconds: float, load: DeviceLoad | None) -> Json:
    row = {"shape": shape._asdict(), "what": what, "when": when, "seconds": seconds}
    return row | {
        "flops_per_second": _flops(shape, what) / seconds,
        "load": load and load._asdict(),
    }


def _flops(shape: Shape, what: str) -> float:
    if what == "product":
        return 2.0 * _WIDTH**3
    return 2.0 * {"forward": 2, "backward": 5}[what] * math.prod(shape)


def main(argv: list[str]) -> int:
    """Measures all shapes and writes the result."""
    options = benchmark_parser(__doc__, "sustained_rates.json").parse_args(argv)
    require_gpu()
    record = Record(options.out, ["jax", "jaxlib"], cases=[])
    record.write()  # or fails before it measures
    for shape in SHAPES:
        for row in measured(shape):
            record.add(row)
            load = row["load"]
            busy = f", {load['sm_mhz']:.0f} MHz, {load['watts']:.0f} W" if load else ""
            words = f"{shape.rows}×{shape.queries}×{shape.keys} {row['what']} {row['when']}"
            rate = row["flops_per_second"] / 1e12
            print(f"{words}: {row['seconds'] * 1e3:.3f} ms, {rate:.0f} TFLOP/s{busy}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
