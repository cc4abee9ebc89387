"""Measures what a layer's forward and backward take under each rematerialisation policy."""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from alload_jax.bench.step import Step, training_spec
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.remat import LADDER, RematPolicy
from alload_jax.training.device_memory import out_of_memory
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.parameters import ALL_TRAINED, ParametersConfig
from alload_jax.training.state import TrainingSpec
from alload_jax.training.step import make_accumulate

_LAYERS = 2
"""Of the model that is timed in place of the whole one."""
_RUNS = 3
CONDITION_TOKENS = 512
"""Condition tokens of a row, for models conditioned on classes."""


def measurable(model: ModelConfig) -> bool:
    """Whether a model of few layers tells the times of the whole one on this device.

    Layers with sparse attention differ from each other, families may have no number of layers, and
    CPUs would take long.
    """
    has_layers = hasattr(model, "num_layers")
    return jax.default_backend() == "gpu" and has_layers and model.sparse_attention is None


def layer_seconds(
    model: ModelConfig,
    latents: tuple[int, ...],
    *,
    optimizer: OptimizerConfig | None = None,
    parameters: ParametersConfig = ALL_TRAINED,
    condition_tokens: int = CONDITION_TOKENS,
) -> dict[RematPolicy, float] | None:
    """Seconds of a layer under each policy, each by the gradient of a model of two layers.

    A share of what does not belong to layers is in all of them alike.

    Args:
      model: its `remat` does not matter.
      latents: (rows, frames, height, width) of a micro-batch.
      optimizer: whose state is held meanwhile; None for the default.
      parameters: which parameters are trained.
      condition_tokens: applies to models conditioned on classes.

    Returns:
      By policy; those that do not fit this device's memory are absent. None where `full` does not.
    """
    found = {}
    try:
        spec = training_spec(_with_policy(model, "full"), optimizer, None, parameters)
        step = Step(spec, condition_tokens)
        programs = _programs(step, model, latents)
    except jax.errors.JaxRuntimeError as error:
        _require_out_of_memory(error)
        return None
    for policy, program in programs.items():
        try:
            found[policy] = _seconds(step, program, latents) / _LAYERS
        except jax.errors.JaxRuntimeError as error:
            _require_out_of_memory(error)
            step.renew()
    return found if "full" in found else None


def _require_out_of_memory(error: jax.errors.JaxRuntimeError) -> None:
    """Raises an error of another kind."""
    if not out_of_memory(error):
        raise error


def _programs(step: Step, model: ModelConfig, latents: tuple[int, ...]) -> dict[RematPolicy, Any]:
    """The compiled gradient under each policy."""
    specs = [step.spec._replace(model=_with_policy(model, each)) for each in LADDER]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        compiled = pool.map(lambda spec: _compiled(step, spec, latents), specs)
        return dict(zip(LADDER, compiled, strict=True))


def square_latents(model: ModelConfig, tokens: int) -> tuple[int, int, int, int]:
    """(1, frames, height, width) of a row of about as many tokens, one frame of patches."""
    height = 2 * max(1, math.isqrt(tokens) // 2)
    width = max(1, tokens // height)
    frames, rows, columns = model.patch_size
    return 1, frames, height * rows, width * columns


def _with_policy(model: ModelConfig, policy: RematPolicy) -> ModelConfig:
    changes: dict[str, Any] = {"num_layers": _LAYERS, "remat": policy, "remat_layers": ()}
    return dataclasses.replace(model, **changes)


def _compiled(step: Step, spec: TrainingSpec, latents: tuple[int, ...]) -> Any:
    accumulate: Any = make_accumulate(spec, step.mesh, single=True)
    state, batch = step.state, step.batch_shape(latents)
    return accumulate.lower(state.weights, step.accumulator, batch, state.key).compile()


def _seconds(step: Step, program: Any, latents: tuple[int, ...]) -> float:
    """The median of a few runs after a first one."""
    batch = step.batch(latents)
    times: Sequence[float] = [_run(step, program, batch) for _ in range(_RUNS + 1)][1:]
    return statistics.median(times)


def _run(step: Step, program: Any, batch: Any) -> float:
    begin = time.perf_counter()
    state = step.state
    step.accumulator = program(state.weights, step.accumulator, batch, state.key)
    jax.block_until_ready(step.accumulator)
    return time.perf_counter() - begin
