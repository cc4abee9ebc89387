"""Times whole training steps of a Wan-1.3B-shaped transformer, with dense and sparse attention.

    python benchmarks/sparse_step.py --out benchmarks/results/sparse_step_h200.json

Dense and sparse steps run in a process each, on the same GPU, one after the other. A sparse program
serves all sparse cases of a length: they differ in the densities that its layers are given. Steps
are timed without and with a measurement of all layers' sparsity. In training, dense layers measure
in each `profile_every`-th step and sparse ones in each `sparse_profile_every`-th: `mean_seconds` is
the mean of such steps.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.bench.harness import (
    MODELS,
    Record,
    benchmark_parser,
    console,
    gigabytes,
    markdown_table,
    model_fields,
    training_fields,
)
from alload_jax.files import Json
from alload_jax.models.common.sparse_attention import SparseAttentionConfig
from alload_jax.models.families import config_from_fields
from alload_jax.training.device_memory import out_of_memory
from alload_jax.training.state import TrainingSpec
from alload_jax.training.trial_step import Step, training_spec

LATENTS = ("21x60x104", "21x90x160", "36x90x160")
"""Frames, height and width: 32,760, 75,600 and 129,600 tokens."""
PROGRAMS = ("dense", "sparse")
MEMORY_SHARE = "0.96"
ENOUGH_SECONDS = 15.0
"""No case takes more steps once its steps have taken this long."""


class Case(NamedTuple):
    """Attention of the layers in one measurement.

    Attributes:
      dense_ends: whether the first and last layers, a sixth of all, are dense.
      density: of the other layers.
    """

    dense_ends: bool
    density: float

    def densities(self, layers: int) -> list[float]:
        """The density of each layer, 1 for dense: 2 dense ones before and 3 behind 25 others."""
        dense = layers // 6 if self.dense_ends else 0
        first = dense * 2 // 5
        sparse = layers - dense
        return [1.0] * first + [self.density] * sparse + [1.0] * (dense - first)

    def name(self, layers: int) -> str:
        """What people call it."""
        sparse = sum(each < 1 for each in self.densities(layers))
        return f"{sparse} of {layers} layers at {self.density:.0%}" if sparse else "dense"


DENSE = Case(False, 1.0)
ENDS = Case(True, 0.1)
SPARSE_CASES = (ENDS, Case(False, 0.1), Case(False, 0.05))


def make_spec(program: str, options: argparse.Namespace) -> TrainingSpec:
    """What the dense program trains, or the sparse one, whose lists hold what any case needs."""
    fields = training_fields(model_fields(options.model, options.layers), options.remat)
    if program == "sparse":
        densest = max(case.density for case in SPARSE_CASES)
        forced = (densest,) * fields["num_layers"]
        sparse = {"selector": options.selector, "forced": forced, "min_tokens": 0}
        fields["sparse_attention"] = sparse
    return training_spec(config_from_fields(fields))


def compile_all(step: Step, latents: list[str]) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes of latents and the gradients for them, which XLA compiles at the same time."""
    shapes = [(1, *map(int, each.split("x"))) for each in latents]
    state = step.state
    lowered = [
        step.accumulate.lower(state.weights, step.accumulator, step.batch_shape(shape), state.key)
        for shape in shapes
    ]
    with ThreadPoolExecutor(len(lowered)) as pool:
        compiled = pool.map(lambda each: each.compile(), lowered)
        return list(zip(shapes, compiled, strict=True))


def set_switches(step: Step, densities: list[float], steps_done: int) -> None:
    """Gives layers their densities, 1 for dense, and the number of steps that they have done."""
    variables = step.state.variables
    blocks = variables["blocks"]
    switch = blocks["sparse_attention"]["switch"]
    given = jnp.asarray(densities)
    new = {
        "sparse": given < 1,
        "density": jnp.broadcast_to(given[:, None], switch["density"].shape),
        "step": jnp.full_like(switch["step"], steps_done),
    }
    placed = {name: jax.device_put(value, switch[name].sharding) for name, value in new.items()}
    sparse = blocks["sparse_attention"] | {"switch": switch | placed}
    step.state = step.state._replace(
        variables=variables | {"blocks": blocks | {"sparse_attention": sparse}}
    )


def time_steps(step: Step, gradient: Any, batch: Any, most: int) -> list[float]:
    """Seconds of a few steps."""
    seconds: list[float] = []
    while len(seconds) < most and sum(seconds) < ENOUGH_SECONDS:
        seconds.append(step.run(gradient, batch))
    return seconds


def time_case(
    step: Step, gradient: Any, batch: Any, densities: list[float], options: argparse.Namespace
) -> Json:
    """Seconds of steps, of sparse ones without a measurement."""
    sparse = step.model.sparse_attention
    most = options.steps
    if sparse is not None:
        # From step 1 on, none measures until `profile_every`.
        set_switches(step, densities, 1)
        most = min(most, sparse.profile_every - 1)
    seconds = time_steps(step, gradient, batch, most)
    found = {
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "steps": len(seconds),
    }
    if sparse is not None:
        switch = step.state.variables["blocks"]["sparse_attention"]["switch"]
        found |= {"sparse_layers": int(switch["sparse"].sum())}
    return found


def time_profile(step: Step, gradient: Any, batch: Any, densities: list[float]) -> float:
    """Seconds of a step that measures the sparsity of its layers; the second such step."""
    for _ in range(2):
        set_switches(step, densities, 0)
        seconds = step.run(gradient, batch)
    return seconds


def measure(program: str, options: argparse.Namespace) -> Iterator[Json]:
    """Measures all cases of a program, in the order of `--latents`."""
    begin = time.perf_counter()
    step = Step(make_spec(program, options))
    gradients = compile_all(step, options.latents)
    compiled = time.perf_counter() - begin
    for number, (shape, gradient) in enumerate(gradients):
        held = sum(x.nbytes for x in jax.tree.leaves((step.state, step.accumulator)))
        shared = {
            "program": program,
            "latents": list(shape[1:]),
            "tokens": math.prod(shape) // math.prod(step.model.patch_size),
            "held_bytes": held,
            "temporary_bytes": gradient.memory_analysis().temp_size_in_bytes,
            "compile_all_seconds": compiled,
        }
        try:
            for found in measure_length(step, gradient, shape, number == 0, options):
                yield shared | found
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            yield shared | {"error": "out of memory"}
            step.renew()


def measure_length(
    step: Step, gradient: Any, shape: tuple[int, ...], first: bool, options: argparse.Namespace
) -> Iterator[Json]:
    """Measures all cases of a program at one length."""
    layers = model_fields(options.model, options.layers)["num_layers"]
    batch, sparse = step.batch(shape), step.model.sparse_attention
    cases: tuple[Case, ...] = (DENSE,)
    if sparse is not None:
        # What the sparse program costs while all layers are dense, at the first length only.
        cases = (*SPARSE_CASES, *cases) if first else SPARSE_CASES
        cases = SPARSE_CASES[:2] if options.brief else cases
        measuring = time_profile(step, gradient, batch, ENDS.densities(layers))
    else:
        step.run(gradient, batch)
    profile = None
    for case in cases:
        name = case.name(layers)
        if sparse is not None and case is DENSE:
            name = "no layer, in the sparse program"
        own: Json = {"name": name, "density": case.density}
        own |= time_case(step, gradient, batch, case.densities(layers), options)
        if sparse is not None:
            # What a measurement adds hardly depends on the case.
            profile = measuring - own["seconds"] if profile is None else profile
            measured = measurements(sparse, own["sparse_layers"] / layers)
            own |= {"profile_seconds": profile, "measurements_a_step": measured}
        own["mean_seconds"] = own["seconds"] + (profile or 0.0) * own.get("measurements_a_step", 0)
        memory = jax.local_devices()[0].memory_stats() or {}
        yield own | {"peak_bytes": memory.get("peak_bytes_in_use")}


def measurements(config: SparseAttentionConfig, sparse_share: float) -> float:
    """Mean measurements of a layer in a step of training."""
    sparse = sparse_share / config.sparse_profile_every
    return sparse + (1 - sparse_share) / config.profile_every


def run_program(program: str, argv: list[str]) -> Iterator[Json]:
    """What a process of its own measures, as soon as it is known."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE}
    command = [sys.executable, __file__, *argv, "--program", program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        yield {"program": program, "error": f"ended with status {process.returncode}"}


def compared(case: Json, cases: list[Json]) -> Json:
    """A case with its tokens per second, and the speed over the dense step of its length."""
    tokens, seconds = case["tokens"], case["mean_seconds"]
    dense = {each["tokens"]: each["mean_seconds"] for each in cases if each.get("name") == "dense"}
    speed = {"times_dense": dense[tokens] / seconds} if tokens in dense else {}
    return case | {"tokens_per_second": tokens / seconds} | speed


def show(cases: list[Json]) -> None:
    """Prints a table of the cases."""
    columns = ("tokens", "s", "with measurements", "times dense", "tokens/s", "most memory")
    table = markdown_table("one training step", ("", *columns))
    for case in cases:
        if "error" in case:
            table.add_row(case.get("name", case["program"]), case["error"])
            continue
        table.add_row(
            case["name"],
            f"{case['tokens']:,}",
            f"{case['seconds']:.3f}",
            f"{case['mean_seconds']:.3f}",
            f"{case.get('times_dense', math.nan):.2f}",
            f"{case['tokens_per_second']:,.0f}",
            gigabytes(case["peak_bytes"]),
        )
    console().print(table)


def main(argv: list[str]) -> None:
    """Runs all cases and writes the results."""
    parser = benchmark_parser(__doc__, "sparse_step.json")
    add = parser.add_argument
    add("--latents", nargs="+", default=LATENTS, help="frames×height×width (default %(default)s)")
    add("--model", choices=tuple(MODELS), default="1.3b")
    add("--layers", type=int, help="fewer layers than the model has")
    add("--remat", default="attention")
    add("--selector", default="predictor")
    add("--steps", type=int, default=3, help="timed steps of a case, at most")
    add("--brief", action="store_true", help="no sparse case but those at 10 %%")
    add("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.program:
        for case in measure(options.program, options):
            print(json.dumps(case), flush=True)
        return
    model = training_fields(model_fields(options.model, options.layers), options.remat)
    packages = ("jax", "jaxlib", "flax")
    record = Record(options.out, packages, model=model, selector=options.selector, cases=[])
    cases = record.content["cases"]
    for program in PROGRAMS:
        for case in run_program(program, argv):
            record.add(case if "error" in case else compared(case, [*cases, case]))
            print(cases[-1], flush=True)
    show(cases)


if __name__ == "__main__":
    main(sys.argv[1:])
