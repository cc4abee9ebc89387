"""Times all kernels of tokens through Triton, Mosaic and XLA, as shares of a copy's speed.

    python benchmarks/kernels.py --out benchmarks/results/kernels_h200.json

Forward and backward are timed apart, on arrays of 50 million elements, bfloat16. A pass must read
and write its arrays once: the time that a copy takes for as many bytes, divided by the kernel's,
is its share. With `--paces` the Mosaic kernels are timed at other paces (`pallas_kernels.walks`).
With `--draw FOLDER` the JSON is not measured but drawn, a picture for each kernel.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.bench.device import copy_bandwidth, device_time, require_gpu, rotating
from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.bench.kernel import Entry
from alload_jax.bench.pictures import draw_kernels
from alload_jax.errors import InputError, run_command
from alload_jax.files import Json, read_json
from pallas_kernels.bias_gelu import api as gelu
from pallas_kernels.bias_gelu import mosaic as gelu_mosaic
from pallas_kernels.bias_gelu import triton as gelu_triton
from pallas_kernels.layernorm_modulate import implementations as norm
from pallas_kernels.layernorm_modulate import mosaic as norm_mosaic
from pallas_kernels.layernorm_modulate import operands as norm_operands
from pallas_kernels.layernorm_modulate.tuning import KINDS, way_for
from pallas_kernels.op import Plain
from pallas_kernels.rms_norm_rotary import api as rotary
from pallas_kernels.rms_norm_rotary import mosaic as rotary_mosaic
from pallas_kernels.rms_norm_rotary import triton as rotary_triton
from pallas_kernels.walks import Pace, Way, way_of

ELEMENTS, HEAD = 50_000_000, 128
WIDTHS = (1024, 1152, 1536, 2048, 3072, 5120, 8192)
GELU_WIDTHS = (4096, 8192, 8960, 13824)
SEGMENTS = 32


class Case(NamedTuple):
    """One way of one pass.

    Attributes:
      kernel, direction, width: what is timed.
      implementation: triton, mosaic or xla.
      call: runs it.
      arguments: of the call.
      bytes_moved: that it must read and write.
      pace: of a Mosaic kernel; None for its own.
    """

    kernel: str
    direction: str
    width: int
    implementation: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes_moved: int
    pace: Pace | None = None


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random values."""
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.float32).astype(dtype)


wide = partial(array, dtype=jnp.float32)
Paces = Sequence[Pace | None]
Passes = tuple[str, Pace | None, Callable[..., Any], Callable[..., Any]]
"""An implementation with its pace, and its forward and backward."""


def own_passes(name: str, module: Any, options: Any) -> Passes:
    """Those of a backend's module, at its own pace."""
    forward = partial(module.forward, options=options)
    return name, None, forward, partial(module.backward, options=options)


def both_cases(
    kernel: str, moved: int, operands: Any, cotangent: jax.Array, reference: Any, ways: list[Passes]
) -> Iterator[Case]:
    """Cases of each way, and of XLA; a forward moves `moved` bytes, a backward x once more."""
    pull = lambda given, d: jax.vjp(reference, given)[1](d)  # noqa: E731
    width, more = operands.x.shape[-1], moved + operands.x.nbytes
    for name, pace, forward, backward in (*ways, ("xla", None, reference, pull)):
        yield Case(kernel, "forward", width, name, forward, (operands,), moved, pace)
        yield Case(kernel, "backward", width, name, backward, (operands, cotangent), more, pace)


def gelu_cases(width: int, paces: Paces) -> Iterator[Case]:
    """Bias and GELU."""
    tokens = ELEMENTS // width
    x, cotangent = array(1, tokens, width), array(1, tokens, width)
    operands = gelu.GeluOperands(x, wide(width))
    modules = {"triton": gelu_triton, "mosaic": gelu_mosaic}
    ways = [own_passes(name, module, Plain()) for name, module in modules.items()]
    for pace in filter(None, paces):
        call = partial(gelu_mosaic.call, pace=pace)
        both = (
            lambda given, c=call: c(gelu_mosaic.FORWARD, given, {}, ("out",)),
            lambda given, d, c=call: c(gelu_mosaic.BACKWARD, given, {"dout": d}, ("dx",)),
        )
        ways.append(("mosaic", pace, *both))
    yield from both_cases("bias_gelu", 2 * x.nbytes, operands, cotangent, gelu.reference, ways)


def rotary_cases(width: int, paces: Paces) -> Iterator[Case]:
    """RMSNorm with rotary embedding, statistics of the whole width, or of heads at 2,048."""
    tokens, per_head = ELEMENTS // width, width == 2048
    x = array(1, tokens, width)
    weight = wide(HEAD if per_head else width)
    tables = wide(tokens, HEAD // 2), wide(tokens, HEAD // 2)
    operands = rotary.RmsNormOperands(x, weight, array(width), *tables)
    options = rotary.RmsNormOptions(HEAD, per_head, 1e-6)
    cotangent = array(*rotary.heads_shape(x, options))
    ways = [own_passes("triton", rotary_triton, options)]
    if rotary.way_for(width, options, 4, rotary.BACKWARD_PACE) is not None:
        ways.append(own_passes("mosaic", rotary_mosaic, options))
        for pace in filter(None, paces):
            call = partial(rotary_mosaic.call, options=options, pace=pace)
            both = (
                lambda given, c=call: c(rotary_mosaic.FORWARD, given, None),
                lambda given, d, c=call: c(rotary_mosaic.BACKWARD, given, d.reshape(x.shape)),
            )
            ways.append(("mosaic", pace, *both))
    moved, reference = (
        2 * x.nbytes + 2 * tables[0].nbytes,
        partial(rotary.reference, options=options),
    )
    yield from both_cases("rms_norm_rotary", moved, operands, cotangent, reference, ways)


def norm_cases(width: int, paces: Paces) -> Iterator[Case]:
    """LayerNorm-Modulate, plain, after a gated residual, and in packed rows."""
    tokens, dtype = ELEMENTS // width, jnp.dtype(jnp.bfloat16)
    x, branch, cotangent, of_h = (array(1, tokens, width) for _ in range(4))
    for kind, streams in (("plain", (2, 3)), ("residual", (4, 6)), ("packed", (2, 3))):
        packed, gated = kind == "packed", kind == "residual"
        table = wide(1, SEGMENTS, width) if packed else wide(1, width)
        ids = (jnp.arange(tokens, dtype=jnp.int32) * SEGMENTS // tokens)[None] if packed else None
        options = norm_operands.NormOptions(
            "segment" if packed else "row", 1e-6, dtype, dtype, dtype, h="sum" if gated else None
        )
        y, gate = (branch, table) if gated else (None, None)
        operands = norm_operands.NormOperands(x, table, table, y, gate, ids)
        kept = norm_operands.NormResiduals(x, wide(1, tokens, 2), table, wide(0), y, gate, ids)
        dh = of_h if gated else None
        for name, way in (("triton", norm.TritonNorm()), ("mosaic", norm.MosaicNorm())):
            prepared = None
            if packed:
                prepared = jax.jit(way.prepare_segments, static_argnums=(1, 2, 3))(
                    ids, SEGMENTS, width, None
                )
            given = operands._replace(prepared=prepared)
            kernel, moved = f"layernorm_modulate, {kind}", [n * x.nbytes for n in streams]
            for pace in paces if name == "mosaic" else [None]:
                forward: Any = partial(way.forward, options=options)
                backward: Any = partial(way.backward, options=options)
                if name == "mosaic":
                    of_kind = "residual_" if gated else ""
                    forward = partial(norm_mosaic.forward, options=options)
                    backward = partial(norm_mosaic.backward, options=options)
                    forward = partial(forward, way=norm_way(f"{of_kind}forward", width, pace))
                    backward = partial(backward, way=norm_way(f"{of_kind}backward", width, pace))
                run = partial(forward, statistics=True)
                yield Case(kernel, "forward", width, name, run, (given,), moved[0], pace)
                given_back = (kept._replace(prepared=prepared), dh, cotangent)
                yield Case(kernel, "backward", width, name, backward, given_back, moved[1], pace)
        if not packed:
            reference = partial(norm_operands.reference, options=options)
            yield Case(kernel, "forward", width, "xla", reference, (operands,), moved[0])


def norm_way(kernel: Any, width: int, pace: Pace | None) -> Way:
    """Of a kernel of LayerNorm-Modulate, of bfloat16."""
    _, streams, *registers = KINDS[kernel]
    each = (width, 2 * streams)
    way = way_of(*each, pace, None, *registers) if pace else way_for(kernel, *each)
    assert way is not None
    return way


def timed(cases: Sequence[Case], copy: float) -> Iterator[Json]:
    """Compiles cases at once, and times them one after the other."""
    with ThreadPoolExecutor(16) as pool:
        programs = pool.map(lambda case: rotating(case.call, [case.arguments]), cases)
        for case, program in zip(cases, list(programs), strict=True):
            time = device_time(program, [case.arguments])
            fields = ("kernel", "direction", "width", "implementation")
            found: Json = {name: getattr(case, name) for name in fields}
            found |= {} if case.pace is None else {"pace": tuple(case.pace)}
            found |= {name: getattr(time, name) for name in ("us", "us_low", "us_high")}
            of_copy = case.bytes_moved / copy / time.us * 1e6
            yield found | {"bytes_moved": case.bytes_moved, "of_copy": of_copy}


def draw(content: Json, folder: Path) -> None:
    """Draws each kernel's shares of a copy as FOLDER/KERNEL.png."""
    kernels: dict[str, list[Entry]] = {}
    for case in content["cases"]:
        name, _, kind = case["kernel"].partition(", ")
        shape = (1, ELEMENTS // case["width"], case["width"])
        moved, *us = (case[field] for field in ("bytes_moved", "us", "us_low", "us_high"))
        place = f"{kind or 'width'} {case['width']:,}"
        words = (case["direction"], case["implementation"], moved, *us, ())
        if "pace" not in case:
            kernels.setdefault(name, []).append(Entry(place, shape, name, *words))
    for name, entries in kernels.items():
        given = content["copy_bytes_per_second"], content["device"]
        draw_kernels(folder / f"{name}.png", entries, *given)


def pace_of(text: str) -> Pace:
    """CHUNKS,GROUPS,BYTES."""
    return Pace(*map(int, text.split(",")))


def main(argv: list[str]) -> int:
    """Measures and writes the JSON after each width."""
    parser = benchmark_parser(__doc__, "kernels.json")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--gelu-widths", type=int, nargs="+", default=GELU_WIDTHS)
    parser.add_argument("--paces", type=pace_of, nargs="*", default=[])
    parser.add_argument("--draw", type=Path, metavar="FOLDER")
    options = parser.parse_args(argv)
    if options.draw:
        if not (content := read_json(options.out)):
            raise InputError(f"{options.out}: no such file; measure first, or name another")
        draw(content, options.draw)
        return 0
    require_gpu()
    copy = copy_bandwidth()
    record = Record(options.out, ["jax", "jaxlib"], copy_bytes_per_second=copy)
    paces: Paces = [None, *options.paces]
    for width in options.gelu_widths:
        record.add(*timed(list(gelu_cases(width, paces)), copy))
    for width in options.widths:
        cases = itertools.chain(rotary_cases(width, paces), norm_cases(width, paces))
        record.add(*timed(list(cases), copy))
    for case in record.content["cases"]:
        words = (case[name] for name in ("kernel", "direction", "width", "implementation"))
        print(*words, case.get("pace", ""), f"{case['us']:.1f} µs, {case['of_copy']:.3f} of copy")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
