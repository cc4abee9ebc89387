"""One training step of this project, measured in a process of its own.

`python -m alload_jax.bench.step '{"model": {...}, ...}'` prints one line of JSON; a process of
its own gives each measurement a peak of memory of its own. `torch_step` is its counterpart.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.bench.provenance import provenance
from alload_jax.bench.weights import without_zeros
from alload_jax.data.batch import AnyBatch, Batch
from alload_jax.models.common.weights import parameter_count
from alload_jax.models.wan.config import TextConfig, WanConfig
from alload_jax.objectives.flow_matching import DiffusionConfig
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import init_state
from alload_jax.training.step import make_accumulate, make_update, zero_accumulator

_LR_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
      model: fields of `WanConfig`; `text` as a dict.
      batch: rows.
      latents: (frames, height, width).
      warmup, steps: runs before, and those that are timed.
      condition_tokens: of each row, where the condition is classes.
    """

    model: dict[str, Any]
    batch: int
    latents: tuple[int, int, int]
    warmup: int = 2
    steps: int = 6
    condition_tokens: int = 512

    def config(self) -> WanConfig:
        """The model."""
        return model_config(self.model)


def model_config(fields: dict[str, Any]) -> WanConfig:
    """A model from JSON's values."""
    fields = dict(fields)
    if fields.get("text"):
        fields["text"] = TextConfig(**fields["text"])
    return WanConfig(**fields | {"patch_size": tuple(fields.get("patch_size", (1, 2, 2)))})


class Step:
    """A training step of one model on one device: gradient of one micro-batch, then the update.

    Attributes:
      model: the transformer.
      state, sums: what a step changes.
      accumulate, update: the jitted halves of a step.
    """

    def __init__(
        self,
        model: WanConfig,
        optimizer: OptimizerConfig | None = None,
        diffusion: DiffusionConfig | None = None,
        condition_tokens: int = 512,
    ):
        """Draws the weights; `condition_tokens` counts where the condition is classes."""
        optimizer = optimizer or OptimizerConfig()
        self.model = model
        self.condition_tokens = condition_tokens
        self.mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
        self._transform = make_optimizer(optimizer, _LR_STEPS)
        self.accumulate: Any = make_accumulate(model, diffusion or DiffusionConfig(), self.mesh)
        self.update: Any = make_update(self._transform, optimizer, self.mesh)
        self.renew()

    def renew(self) -> None:
        """A fresh state. What was donated to a step that failed is gone with it."""
        self.state: Any = None
        self.sums: Any = None
        self.state = without_zeros(init_state(self.model, self._transform, self.mesh, 0))
        self.sums = zero_accumulator(self.state.params, self.mesh)

    def compile(self, latents: tuple[int, ...]) -> Any:
        """The gradient's program for latents (rows, frames, height, width)."""
        return self.compile_for(self.batch_shape(latents))

    def compile_for(self, batch: AnyBatch) -> Any:
        """The gradient's program for a micro-batch's shapes and dtypes."""
        epoch = jax.ShapeDtypeStruct((), jnp.int32)
        lowered = self.accumulate.lower(self.state.params, self.sums, batch, self.state.key, epoch)
        return lowered.compile()

    def batch_shape(self, latents: tuple[int, ...]) -> Batch:
        """Shapes and dtypes of a micro-batch."""
        return jax.eval_shape(lambda: random_batch(self.model, latents, self.condition_tokens))

    def batch(self, latents: tuple[int, ...]) -> Batch:
        """A random micro-batch."""
        make = jax.jit(random_batch, static_argnums=(0, 1, 2))
        return make(self.model, latents, self.condition_tokens)

    def run(self, gradient: Any, batch: AnyBatch) -> float:
        """Seconds of one step.

        Raises:
          FloatingPointError: the loss is not finite.
        """
        begin = time.perf_counter()
        self.sums = gradient(self.state.params, self.sums, batch, self.state.key, jnp.int32(0))
        self.state, self.sums, metrics = self.update(self.state, self.sums)
        loss = float(metrics["loss"])
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        return time.perf_counter() - begin


def random_batch(model: WanConfig, latents: tuple[int, ...], text_length: int = 512) -> Batch:
    """Random latents (rows, frames, height, width) and conditions of the model's kind."""
    rows = latents[0]
    if model.text:
        shape = (rows, model.text.length, model.text.dim)
        condition = jax.random.normal(jax.random.key(2), shape, model.compute_dtype)
    else:
        condition = jnp.zeros((rows, text_length), jnp.int32)
    return Batch(
        latents=jax.random.normal(jax.random.key(1), (*latents, model.in_channels)),
        condition=condition,
        sample=jnp.arange(rows, dtype=jnp.int32),
        weight=jnp.ones((rows,)),
    )


def out_of_memory(error: Exception) -> bool:
    """Whether an error of JAX's runtime says that the device's memory did not suffice."""
    return "RESOURCE_EXHAUSTED" in str(error)


def measure(settings: Settings) -> dict[str, Any]:
    """Median seconds of a step and the most memory that it took; or the error that it ended in."""
    model, latents = settings.config(), (settings.batch, *settings.latents)
    noted = provenance(["jax", "jaxlib", "flax"]) | {
        "settings": dataclasses.asdict(settings),
        "parameters": parameter_count(model),
        "tokens": settings.batch * math.prod(settings.latents) // math.prod(model.patch_size),
    }
    begin = time.perf_counter()
    try:
        step = Step(model, condition_tokens=settings.condition_tokens)
        gradient = step.compile(latents)
        compiled = time.perf_counter()
        batch = step.batch(latents)
        runs = settings.warmup + settings.steps
        seconds = [step.run(gradient, batch) for _ in range(runs)][settings.warmup :]
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return noted | {"error": "out of memory"}
    memory = jax.local_devices()[0].memory_stats() or {}
    return noted | {
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "compile_seconds": compiled - begin,
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "temporary_bytes": gradient.memory_analysis().temp_size_in_bytes,
    }


def main() -> None:
    """Measures what the first argument asks for."""
    fields = json.loads(sys.argv[1])
    fields["latents"] = tuple(fields["latents"])
    print(json.dumps(measure(Settings(**fields))))


if __name__ == "__main__":
    main()
