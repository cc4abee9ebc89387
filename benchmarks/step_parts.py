"""Times whole training steps of several shapes and ways to keep activations, in one process.

    python benchmarks/step_parts.py

All programs are compiled at once and share one state. `bytes` is what XLA's programs and the state
take together; `of_roof` compares with matrix products at this device's rate, cuDNN's attention
measured alone, and the optimizer's bytes at the rate of a copy, all in the same run.
"""

import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from alload_jax.bench.device import require_gpu
from alload_jax.bench.harness import Record, benchmark_parser, model_fields, training_fields
from alload_jax.bench.step_profile.roofs import measure as measure_roofs
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import config_from_fields
from alload_jax.planning.architecture import from_fields
from alload_jax.sharding.host_memory import set_xla_flags
from alload_jax.training.step import make_accumulate
from alload_jax.training.trial_step import Step, training_spec

_TEXT = 512


class Case(NamedTuple):
    """A step.

    Attributes:
      rows: of a micro-batch.
      latents: (frames, height, width) of a row.
      remat: as `model.remat`.
      unrolled: whether layers are compiled one by one.
    """

    rows: int
    latents: tuple[int, int, int]
    remat: str
    unrolled: bool = False

    @property
    def tokens(self) -> int:
        """Of a row, in patches of 1×2×2 latents."""
        return math.prod(self.latents) // 4

    @property
    def name(self) -> str:
        """In words."""
        words = f"{self.rows}×{self.tokens:,}, {self.remat}"
        return words + ", unrolled" * self.unrolled


CLIP, IMAGES, MIDDLE = (1, (21, 60, 104)), (42, (1, 60, 104)), (8, (8, 64, 32))
CASES = (
    Case(*IMAGES, "matmuls_and_attention", unrolled=True),
    Case(*MIDDLE, "none", unrolled=True),
    Case(*CLIP, "none", unrolled=True),
    Case(*CLIP, "matmuls_and_attention"),
    Case(*CLIP, "offload_attention"),
    Case(*CLIP, "offload_feed_forward_and_attention"),
    Case(*CLIP, "attention"),
    Case(*CLIP, "feed_forward_and_attention"),
    Case(*CLIP, "full"),
)


def lowered(step: Step, case: Case, model: ModelConfig) -> Any:
    """The gradient of a case, to be compiled."""
    fields: Json = {"remat": case.remat, "scan_layers": not case.unrolled}
    spec = training_spec(dataclasses.replace(model, **fields))
    batch = step.batch_shape((case.rows, *case.latents))
    state = step.state
    program: Any = make_accumulate(spec, step.mesh, single=True)
    return program.lower(state.weights, step.accumulator, batch, state.key)


def timed(step: Step, case: Case, program: Any, repeats: int) -> Json:
    """Seconds of the steps of a case, and bytes."""
    batch = step.batch((case.rows, *case.latents))
    seconds = [step.run(program, batch) for _ in range(repeats + 1)][1:]
    found = program.memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((step.state, step.accumulator, batch)))
    return {
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "bytes": held + found.temp_size_in_bytes,
    }


def roof_seconds(
    case: Case, step: Step, fields: Mapping[str, Any], roofs: Mapping[str, Any]
) -> float:
    """Products at their rate, attention as measured alone, the optimizer's bytes as a copy."""
    flops = from_fields(fields).flops()
    products = 3 * case.rows * (flops.matmul_per_token * case.tokens + flops.matmul_per_sequence)
    calls = [each for each in roofs["attention"] if (each["rows"], each["queries"]) ==
             (case.rows, case.tokens)]  # fmt: skip
    passes = (each["forward_seconds"] + each["backward_seconds"] for each in calls)
    attending = fields["num_layers"] * sum(passes)
    state, grads = step.state, step.accumulator.grads
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state, state.ema)))
    moved = 2 * kept + sum(leaf.nbytes for leaf in jax.tree.leaves(grads))
    optimizer = moved / roofs["copy_bytes_per_second"]
    return products / roofs["matmul_flops_per_second"] + attending + optimizer


def shapes_of(cases: Sequence[Case], fields: Mapping[str, Any]) -> list[dict[str, int]]:
    """Self- and cross-attention of each shape."""
    heads, found = fields["num_heads"], []
    of_head = {"heads": heads, "head_dim": fields["dim"] // heads}
    for rows, tokens in dict.fromkeys((case.rows, case.tokens) for case in cases):
        shared = of_head | {"rows": rows, "queries": tokens}
        found += [shared | {"keys": keys} for keys in (tokens, _TEXT)]
    return found


def main(argv: list[str]) -> int:
    """Compiles all cases, times them, and writes the result after each."""
    parser = benchmark_parser(__doc__, "step_parts.json")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps (default 5)")
    options = parser.parse_args(argv)
    set_xla_flags()
    require_gpu()
    fields = model_fields("1.3b", options.layers)
    model = config_from_fields(training_fields(fields))
    record = Record(options.out, ("jax", "jaxlib", "flax"), model=fields, cases=[])
    result = record.content
    step, begin = Step(training_spec(model)), time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        update = pool.submit(step.update.lower(step.state, step.accumulator).compile)
        pending = [pool.submit(lowered(step, case, model).compile) for case in CASES]
        step.update = update.result()
        programs = [each.result() for each in pending]
    result["compile_seconds"] = time.perf_counter() - begin
    for case, program in zip(CASES, programs, strict=True):
        row = {"name": case.name, **case._asdict()} | timed(step, case, program, options.repeats)
        record.add(row)
        print(f"{case.name}: {row['seconds']:.4f} s, {row['bytes'] / 1e9:.1f} GB", flush=True)
    result["roofs"] = roofs = measure_roofs(shapes_of(CASES, fields))
    for case, row in zip(CASES, result["cases"], strict=True):
        row["roof_seconds"] = roof_seconds(case, step, fields, roofs)
        row["of_roof"] = row["roof_seconds"] / row["seconds"]
        print(f"{case.name}: {row['of_roof']:.3f} of the roof", flush=True)
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
