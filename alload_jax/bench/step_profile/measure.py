"""Traces training steps in a separate process and says which part each kernel belongs to.

Kernels in CUDA graphs are not shown, so the process wants `NO_GRAPHS` in XLA_FLAGS.
"""

import gzip
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
from jax.profiler import ProfileData

from alload_jax.bench.harness import provenance
from alload_jax.bench.step_process import Settings, resolved
from alload_jax.bench.step_profile.attribution import (
    COMMUNICATION,
    OPTIMIZER,
    Attribution,
    attributions,
    containers,
    unknown,
)
from alload_jax.bench.step_profile.hlo import read_program, wrapping_starts
from alload_jax.bench.trace import (
    Operation,
    divided_steps,
    is_collective,
    recorded,
    step_windows,
    time_of_operations,
)
from alload_jax.errors import out_of_memory
from alload_jax.files import Json
from alload_jax.training.trial_step import Step, training_spec

NO_GRAPHS = "--xla_gpu_enable_command_buffer="
"""Flag of XLA with which it runs kernels one by one rather than as CUDA graphs."""
_TRACED = 3


def measure(*, keep: str | None = None, **fields: Any) -> Json:
    """Seconds of a step by operation, each with its part; or the error that ended it.

    Args:
      keep: folder for the raw trace and the programs; None for none.
      fields: of `Settings`.
    """
    settings, folder = Settings(**fields), Path(keep) if keep else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    result = provenance(["jax", "jaxlib", "flax"])
    try:
        model, _ = resolved(settings)
        step = Step(training_spec(model), settings.condition_tokens)
        gradient = step.compile((settings.batch, *settings.latents))
        step.compile_update()
        batch = step.batch((settings.batch, *settings.latents))
        for _ in range(settings.warmup):
            step.run(gradient, batch)
        trace = folder / "trace.xplane.pb.gz" if folder else None
        _, profile = recorded([partial(step.run, gradient, batch)] * _TRACED, trace)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return result | {"error": "out of memory"}
    texts = {"accumulate": gradient.as_text(), "update": step.update.as_text()}
    if folder:
        for name, text in texts.items():
            (folder / f"{name}.hlo.txt.gz").write_bytes(gzip.compress(text.encode()))
    # An update reads and writes the state, and reads the gradients.
    kept = jax.tree.leaves((step.state.params, step.state.opt_state, step.state.ema))
    moved = 2 * sum(leaf.nbytes for leaf in kept)
    moved += sum(leaf.nbytes for leaf in jax.tree.leaves(step.accumulator.grads))
    return result | {
        "backend": jax.default_backend(),
        "optimizer_bytes": moved,
        **attributed(profile, texts["accumulate"], texts["update"]),
    }


def attributed(profile: ProfileData, accumulate: str, update: str) -> Json:
    """Seconds of a traced step by operation, each with its part.

    Args:
      profile: of `recorded`.
      accumulate: text of the compiled program of gradients.
      update: that of the optimizer's.
    """
    programs = {each.name: each for each in map(read_program, (accumulate, update))}
    optimizer = [*programs][-1]
    steps = divided_steps(profile, {name: containers(each) for name, each in programs.items()})
    if not steps or not steps[0]:
        raise ValueError("the profile has no steps; record it with `recorded`")
    spent = time_of_operations(steps)
    parts = {}
    for name, program in programs.items():
        known = attributions(program, OPTIMIZER if name == optimizer else "")
        shown = (each.instruction for each in spent if each.program == name)
        starts = wrapping_starts(program, shown)
        parts[name] = known | {wrapped: known[start] for wrapped, start in starts.items()}
    operations = []  # FLOPs and bytes are those of one run
    for operation, each_spent in spent.items():
        attribution = attribution_of(operation, parts)
        call = attribution.attention
        fields = operation._asdict() | attribution._asdict() | each_spent
        operations.append(fields | {"attention": call and call._asdict()})
    return {
        "traced_seconds": fmean(end - begin for begin, end in step_windows(profile)) / 1e9,
        "traced_steps": len(steps),
        "devices": len(steps[0]),
        "idle_seconds": fmean(idle for step in steps for _, idle in step),
        "operations": operations,
    }


def attribution_of(
    operation: Operation, parts: Mapping[str, Mapping[str, Attribution]]
) -> Attribution:
    """The attribution of a kernel, that of `unknown` where no program has its instruction."""
    known = parts.get(operation.program, {}).get(operation.instruction)
    found = known or unknown(operation.instruction)
    if is_collective(operation):
        return found._replace(part=COMMUNICATION, detail="")
    return found
