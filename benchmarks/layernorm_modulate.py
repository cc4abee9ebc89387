"""The figures of the LayerNorm-Modulate kernels: `alload bench kernel`, beside other libraries.

    python benchmarks/layernorm_modulate.py --out benchmarks/results/layernorm_modulate_h200

takes the command's flags and writes the same JSON and PNG, with PyTorch (eager and compiled) and
tokamax in them where those are installed.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from alload_jax.bench.device import DeviceTime, call_time
from alload_jax.bench.harness import version_of
from alload_jax.bench.kernel import Arguments, Function, Pass
from alload_jax.commands import bench
from alload_jax.errors import run_command

EPS = 1e-6


def measure_others(
    function: Function, direction: Pass, sets: Sequence[Arguments]
) -> Iterator[tuple[str, DeviceTime]]:
    """(name, time) of each library that is installed and has the function (`kernel.Rival`)."""
    if function != "layernorm_modulate":
        return
    if version_of("torch") and version_of("triton"):
        yield from _torch(direction, sets[0])
    # tokamax has one scale and offset for all rows of a batch.
    if sets[0].x.shape[0] == 1 and version_of("tokamax"):
        yield "tokamax", _tokamax(direction, sets)


def _torch(direction: Pass, arguments: Arguments) -> Iterator[tuple[str, DeviceTime]]:
    """PyTorch, eager and compiled, by CUDA events with the L2 cache cleared between calls."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return
    x, dout = (torch.from_dlpack(value).detach() for value in (arguments.x, arguments.dout))
    scale, shift = (torch.from_dlpack(value).detach() for value in arguments[4:6])
    inputs = [value.clone().requires_grad_() for value in (x, scale, shift)]

    def modulate(x: Any, scale: Any, shift: Any) -> Any:
        normed = torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), eps=EPS)
        return (normed * (1 + scale[:, None]) + shift[:, None]).to(x.dtype)

    torch._dynamo.reset()
    functions = {"torch": modulate, "torch.compile": torch.compile(modulate, dynamic=False)}
    for name, function in functions.items():
        if direction == "forward":
            with torch.no_grad():
                yield name, _cuda_events(partial(function, x, scale, shift))
        else:
            out = function(*inputs)
            call = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
            yield name, _cuda_events(call)
    torch.cuda.empty_cache()


def _cuda_events(call: Callable[[], Any]) -> DeviceTime:
    testing = importlib.import_module("triton.testing")
    low, median, high = testing.do_bench(call, quantiles=[0.1, 0.5, 0.9])
    return DeviceTime(1e3 * median, 1e3 * low, 1e3 * high, ())


def _tokamax(direction: Pass, sets: Sequence[Arguments]) -> DeviceTime:
    tokamax = importlib.import_module("tokamax")
    flags.FLAGS.mark_as_parsed()  # tokamax would parse this command's own line otherwise

    def forward(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        return tokamax.layer_norm(
            x, scale, offset, scale_offset=1.0, epsilon=EPS, implementation="triton"
        )

    inputs = [(a.x, a.scale[0], a.shift[0]) for a in sets]
    if direction == "forward":
        return call_time(forward, inputs)
    linearise = jax.jit(lambda *operands: jax.vjp(forward, *operands)[1])
    kept = [
        (linearise(*operands), jnp.copy(a.dout)) for operands, a in zip(inputs, sets, strict=True)
    ]
    return call_time(lambda vjp, dout: vjp(dout), kept)


def main(argv: list[str]) -> int:
    """Measures what the flags name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bench.add_kernel_arguments(parser)
    options = parser.parse_args(argv)
    measured = [name for name in ("torch", "triton", "tokamax") if version_of(name)]
    return bench.run_kernel(options, [measure_others], measured)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
