"""Measures training steps in a separate process: one, and one by each rematerialisation.

Each measurement has its own process, so that its peak of memory is its own. The counterpart in
PyTorch is benchmarks/torch_step.py.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from alload_jax.bench.device import load_of, sampling
from alload_jax.bench.harness import provenance
from alload_jax.errors import InputError, out_of_memory
from alload_jax.files import Json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import config_from_fields, parameter_count
from alload_jax.planning.analytic import state_bytes
from alload_jax.planning.remat import AUTO_REMAT, RematPolicy
from alload_jax.sharding.host_memory import host_bytes
from alload_jax.training.memory import choose_for, memory_budget, trained_of
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.parameters import ALL_TRAINED
from alload_jax.training.run_files import peak_memory
from alload_jax.training.trial_step import (
    Step,
    layer_seconds,
    measurable,
    tokens_beside,
    training_spec,
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one measurement.

    Attributes:
      model: fields of the model's config; `text` as a dict.
      batch: number of rows.
      latents: (frames, height, width) in latents.
      warmup, steps: number of untimed and of timed steps.
      condition_tokens: condition tokens of each row, for models conditioned on classes.
    """

    model: Json
    batch: int
    latents: tuple[int, int, int]
    warmup: int = 2
    steps: int = 6
    condition_tokens: int = 512

    def config(self) -> ModelConfig:
        """The model's config."""
        return config_from_fields(self.model)


def resolved(settings: Settings) -> tuple[ModelConfig, Mapping[RematPolicy, float] | None]:
    """The model; with `remat: auto`, what this device's memory holds of it.

    Returns:
      The model, and the seconds of a layer by policy if they were measured to choose.

    Raises:
      InputError: nothing fits.
    """
    model = settings.config()
    if model.remat != AUTO_REMAT or (budget := memory_budget(model)) is None:
        return model, None
    tokens = settings.batch * math.prod(settings.latents) // math.prod(model.patch_size)
    tokens += settings.batch * tokens_beside(model, settings.condition_tokens)
    latents, text = (settings.batch, *settings.latents), settings.condition_tokens
    measure = partial(layer_seconds, model, latents, condition_tokens=text)
    given: Json = {"rows": settings.batch, "measure": measure if measurable(model) else None}
    choice = choose_for(model, tokens, budget, ALL_TRAINED, OptimizerConfig(), **given)
    model = dataclasses.replace(model, remat="none", remat_layers=choice.policies)
    return model, choice.layer_seconds


def measure(**fields: Any) -> Json:
    """Median seconds and peak bytes of a step, and the device's clock and power meanwhile.

    Or the error that ended the measurement. The keywords are the fields of `Settings`.

    Raises:
      InputError: the model's state fills the memory of a host without a GPU, which might stop.
    """
    settings = Settings(**fields)
    model = settings.config()
    trained = trained_of(model, ALL_TRAINED, OptimizerConfig())
    state = state_bytes(parameter_count(model), trained)
    if jax.default_backend() == "cpu" and state > host_bytes() / 2:
        raise InputError(
            "alload bench step: no GPU, and weights, gradients and optimizer take "
            f"{state / 1e9:.0f} of this host's {host_bytes() / 1e9:.0f} GB; give --model tiny, or "
            "fewer --layers"
        )
    try:
        model, times = resolved(settings)
    except InputError as error:
        return {"error": str(error), "settings": dataclasses.asdict(settings)}
    latents = (settings.batch, *settings.latents)
    recorded = provenance(["jax", "jaxlib", "flax"]) | {
        "settings": dataclasses.asdict(settings),
        "parameters": parameter_count(model),
        "policies": list(model.policies),
        "tokens": settings.batch * math.prod(settings.latents) // math.prod(model.patch_size),
        "tokens_beside": tokens_beside(model, settings.condition_tokens),
    }
    recorded |= {"layer_seconds": times} if times else {}
    begin = time.perf_counter()
    try:
        step = Step(training_spec(model), settings.condition_tokens)
        gradient = step.compile(latents)
        compiled = time.perf_counter()
        batch = step.batch(latents)
        for _ in range(settings.warmup):
            step.run(gradient, batch)
        with sampling() as lines:
            seconds = [step.run(gradient, batch) for _ in range(settings.steps)]
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return recorded | {"error": "out of memory"}
    found = gradient.memory_analysis()
    peak = peak_memory()
    if settings.model.get("remat") == AUTO_REMAT and peak is not None:
        # The device's peak may be that of the policies that were timed in this process.
        peak = found.temp_size_in_bytes + sum(
            leaf.nbytes for leaf in jax.tree.leaves((step.state, step.accumulator, batch))
        )
    return recorded | {
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "compile_seconds": compiled - begin,
        "peak_bytes": peak,
        "temporary_bytes": found.temp_size_in_bytes,
        "load": load_of(lines),
    }
