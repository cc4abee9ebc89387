"""Times whole training steps of a Wan-1.3B-shaped transformer, with dense and sparse attention.

    python benchmarks/sparse_step.py --out benchmarks/results/sparse_step_h200.json

Dense and sparse steps run in a process each, on the same GPU, one after the other. A sparse program
serves all sparse cases of a length: they differ in the densities that its layers are given. Steps
are timed without and with a measurement of all layers' sparsity. In training, dense layers measure
in each `profile_every`-th step and sparse ones in each `sparse_profile_every`-th: `mean_seconds` is
the mean of such steps.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.bench.harness import (
    MODELS,
    Record,
    benchmark_parser,
    measured,
    model_fields,
    training_fields,
)
from alload_jax.errors import out_of_memory, run_command
from alload_jax.files import Json
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.families import config_from_fields
from alload_jax.training.state import TrainingSpec
from alload_jax.training.trial_step import Step, training_spec

LATENTS = ("21x60x104", "21x90x160", "36x90x160")
"""Frames, height and width: 32,760, 75,600 and 129,600 tokens."""
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
CASES = {"dense": (DENSE,), "sparse": (ENDS, Case(False, 0.1))}
"""By program."""


def make_spec(program: str, model: Json) -> TrainingSpec:
    """What the dense program trains, or the sparse one, whose lists hold what any case needs."""
    if program == "sparse":
        densest = max(case.density for case in CASES[program])
        forced = (densest,) * model["num_layers"]
        sparse = {"selector": "predictor", "forced": forced, "min_tokens": 0}
        model = model | {"sparse_attention": sparse}
    return training_spec(config_from_fields(model))


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


def time_case(step: Step, gradient: Any, batch: Any, densities: list[float], most: int) -> Json:
    """Seconds of a few steps, of sparse ones without a measurement."""
    sparse = step.model.sparse_attention
    if sparse is not None:
        # From step 1 on, none measures until `profile_every`.
        set_switches(step, densities, 1)
        most = min(most, sparse.profile_every - 1)
    seconds: list[float] = []
    while len(seconds) < most and sum(seconds) < ENOUGH_SECONDS:
        seconds.append(step.run(gradient, batch))
    return {
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "steps": len(seconds),
    }


def time_profile(step: Step, gradient: Any, batch: Any, densities: list[float]) -> float:
    """Seconds of a step that measures the sparsity of its layers; the second such step."""
    for _ in range(2):
        set_switches(step, densities, 0)
        seconds = step.run(gradient, batch)
    return seconds


def measure(program: str, model: Json, latents: list[str], steps: int) -> Iterator[Json]:
    """Measures all cases of a program at all lengths."""
    step = Step(make_spec(program, model))
    for shape, gradient in compile_all(step, latents):
        held = sum(x.nbytes for x in jax.tree.leaves((step.state, step.accumulator)))
        shared = {
            "program": program,
            "latents": list(shape[1:]),
            "tokens": math.prod(shape) // math.prod(step.model.patch_size),
            "held_bytes": held,
            "temporary_bytes": gradient.memory_analysis().temp_size_in_bytes,
        }
        try:
            layers = model["num_layers"]
            for found in measure_length(program, layers, step, gradient, shape, steps):
                yield shared | found
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            yield shared | {"error": "out of memory"}
            step.renew()


def measure_length(
    program: str, layers: int, step: Step, gradient: Any, shape: tuple[int, ...], steps: int
) -> Iterator[Json]:
    """Measures all cases of a program at one length."""
    batch, sparse = step.batch(shape), step.model.sparse_attention
    profile, measuring = None, 0.0
    if sparse is not None:
        measuring = time_profile(step, gradient, batch, ENDS.densities(layers))
    else:
        step.run(gradient, batch)
    for case in CASES[program]:
        densities = case.densities(layers)
        own: Json = {"name": case.name(layers), "density": case.density}
        own |= time_case(step, gradient, batch, densities, steps)
        own["mean_seconds"] = own["seconds"]
        if sparse is not None:
            # What a measurement adds hardly depends on the case.
            profile = measuring - own["seconds"] if profile is None else profile
            share = measurements(sparse, sum(each < 1 for each in densities) / layers)
            own |= {"profile_seconds": profile, "measurements_a_step": share}
            own["mean_seconds"] += profile * share
        memory = jax.local_devices()[0].memory_stats() or {}
        yield own | {"peak_bytes": memory.get("peak_bytes_in_use")}


def measurements(config: SparseAttentionConfig, sparse_share: float) -> float:
    """Mean measurements of a layer in a step of training."""
    sparse = sparse_share / config.sparse_profile_every
    return sparse + (1 - sparse_share) / config.profile_every


def main(argv: list[str]) -> int:
    """Runs all cases and writes the results."""
    parser = benchmark_parser(__doc__, "sparse_step.json")
    add = parser.add_argument
    add("--latents", nargs="+", default=LATENTS, help="frames×height×width (default %(default)s)")
    add("--model", choices=tuple(MODELS), default="1.3b")
    add("--layers", type=int, help="fewer layers than the model has")
    add("--steps", type=int, default=3, help="timed steps of a case, at most")
    options = parser.parse_args(argv)
    model = training_fields(model_fields(options.model, options.layers))
    record = Record(options.out, ("jax", "jaxlib", "flax"), model=model, cases=[])
    dense: dict[int, float] = {}
    for program in CASES:
        settings = {"program": program, "model": model, "latents": options.latents}
        found = measured(Path(__file__), settings | {"steps": options.steps})
        for case in found.get("cases", [found]):
            if "mean_seconds" in case:
                tokens, seconds = case["tokens"], case["mean_seconds"]
                dense |= {tokens: seconds} if program == "dense" else {}
                case |= {"tokens_per_second": tokens / seconds}
                case |= {"times_dense": dense[tokens] / seconds} if tokens in dense else {}
            record.add(case)
            print(case, flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):  # a program of its own
        print(json.dumps({"cases": list(measure(**json.loads(sys.argv[1])))}))
    else:
        sys.exit(run_command(main, sys.argv[1:]))
