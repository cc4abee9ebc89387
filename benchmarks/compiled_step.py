"""Says what training steps hold and move on a GPU, from programs that XLA compiles without one.

    python benchmarks/compiled_step.py
    python benchmarks/compiled_step.py --sharded

`bytes` is what the state and the gradient's program take together, and `host` what the program
takes of the host's memory. `moved` are the bytes that its kernels must read and write, by part and
pass, matrix products and fused attention left out; for layers that are compiled one by one alone,
since a loop's passes are not counted.

`--sharded` compiles for two GPUs: a few layers of a model, with a row for each GPU or one for both,
on meshes of which each has another axis of two. `temporary` is what the gradient's program takes on
each beside its arguments, and `gathered` the bytes of what it gathers from both, by dtype, those of
a loop over layers once. See `benchmarks/gpu_target.py` for what the programs lack.
"""

import itertools
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import gpu_target

from alload_jax.bench.harness import benchmark_parser, model_fields, training_fields
from alload_jax.bench.step_profile.attribution import PRODUCTS, attributions
from alload_jax.bench.step_profile.hlo import read_program
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.models.families import config_from_fields
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.trial_step import training_spec


class Case(NamedTuple):
    """A step of `rows` of latents (frames, height, width); layers are one by one or a loop."""

    rows: int
    latents: tuple[int, int, int]
    remat: str
    unrolled: bool = False

    @property
    def name(self) -> str:
        """In words."""
        tokens = math.prod(self.latents) // 4
        return f"{self.rows}×{tokens:,}, {self.remat}" + ", unrolled" * self.unrolled


CLIP, IMAGES = (1, (21, 60, 104)), (42, (1, 60, 104))
CASES = (
    Case(*IMAGES, "matmuls_and_attention", unrolled=True),
    Case(*CLIP, "full"),
    Case(*CLIP, "offload_attention"),
    Case(*CLIP, "offload_feed_forward_and_attention"),
    Case(*CLIP, "attention"),
    Case(*CLIP, "feed_forward_and_attention"),
    Case(*CLIP, "matmuls_and_attention", unrolled=True),
    Case(*CLIP, "norms_matmuls_and_attention", unrolled=True),
    Case(*CLIP, "none", unrolled=True),
)

LAYERS = 4
LATENTS = {"1.3b": (21, 60, 104), "hunyuan-video-1.5": (9, 30, 52)}
"""Of a row, by model, of `--sharded`."""
AXES = ("data", "fsdp", "tensor")
REMAT = ("attention", "offload_feed_forward_and_attention")
_GATHERED = re.compile(r"= (.*) all-gather(?:-done)?\(")
_ARRAY = re.compile(r"\b([a-z]+(\d+)\w*)\[([\d,]*)\]")


def moved(text: str) -> dict[str, float]:
    """Bytes that kernels move by part and pass, without products and fused attention."""
    program, found = read_program(text), defaultdict[str, float](float)
    for name, each in attributions(program).items():
        views = program.executed[name].opcode == "bitcast"
        if not views and each.part != PRODUCTS and each.attention is None:
            found[" ".join(filter(None, (each.part, each.detail)))] += each.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def steps(devices: list[Any]) -> Iterator[Json]:
    """What steps hold and move."""
    for case in CASES:
        chosen = training_fields(model_fields("1.3b"), case.remat, scan_layers=not case.unrolled)
        with gpu_target.traced_for(devices[0]):
            spec, mesh = training_spec(config_from_fields(chosen)), make_mesh(MeshConfig(), devices)
            gradient = gpu_target.compiled_gradient(spec, mesh, case.rows, case.latents)
        found = gradient.program.memory_analysis()
        row = {"name": case.name, **case._asdict()}
        row |= {"bytes": gradient.bytes, "temporary": found.temp_size_in_bytes}
        row["host"] = found.host_temp_size_in_bytes
        yield row | ({"moved": moved(gradient.program.as_text())} if case.unrolled else {})


def gathered(text: str) -> dict[str, int]:
    """Bytes that a program's instructions gather from all devices, by dtype."""
    found = Counter[str]()
    for result in _GATHERED.findall(text):
        for dtype, bits, shape in _ARRAY.findall(result):
            found[dtype] += int(bits) // 8 * math.prod(map(int, filter(None, shape.split(","))))
    return dict(found)


def sharded(devices: list[Any]) -> Iterator[Json]:
    """What steps hold on each of two GPUs, and gather."""
    cases = [(*case, "dtype") for case in itertools.product(LATENTS, AXES, REMAT)]
    for model, axis, remat, matmul in [*cases, ("1.3b", "fsdp", "attention", "float8")]:
        fields = training_fields(model_fields(model, LAYERS), remat) | {"matmul": matmul}
        with gpu_target.traced_for(devices[0]):
            spec = training_spec(config_from_fields(fields))
            mesh = make_mesh(MeshConfig(**({"data": 1} | {axis: 2})), devices)
            ranks = mesh.size // mesh.shape["tensor"]
            found = gpu_target.compiled_gradient(spec, mesh, ranks, LATENTS[model]).program
        case = {"model": model, "axis": axis, "remat": remat, "matmul": matmul}
        held = found.memory_analysis().temp_size_in_bytes
        yield case | {"temporary": held, "gathered": gathered(found.as_text())}


def main(argv: list[str]) -> int:
    """Compiles the cases and writes the result after each."""
    parser = benchmark_parser(__doc__, "compiled_step.json")
    parser.add_argument("--sharded", action="store_true", help="for two GPUs, of two models")
    options = parser.parse_args(argv)
    if options.sharded:
        return gpu_target.record(options.out, sharded, "flax", gpus=2)
    return gpu_target.record(options.out, steps, "flax")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
