"""An objective, a callback, a data set and an evaluator, as somebody outside would write them."""

import json
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.data.store import StoreWriter
from alload_jax.diffusion.timesteps import TimestepConfig
from alload_jax.errors import InputError
from alload_jax.objectives import FlowMatching, LossSums
from alload_jax.training.callbacks import Callback


@dataclass(frozen=True)
class HalfVelocity:
    """Half of flow matching's loss, and the predictors' loss of the pooling family's layers."""

    name: Literal["half_velocity"] = "half_velocity"
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    predictor_weight: float = 1.0

    def __call__(self, model, batch, key, sharding):
        sums = FlowMatching(timesteps=self.timesteps)(model, batch, key, sharding)
        predictors = jnp.mean(sums.auxiliary["predictor_loss"])
        minimised = 0.5 * sums.loss + self.predictor_weight * predictors
        return LossSums(minimised, 0.5 * sums.loss, sums.weight, sums.auxiliary)


@dataclass(frozen=True)
class CountConfig:
    """Where the count is written, and after which steps."""

    name: Literal["count"] = "count"
    every: int = 2

    def make(self, context):
        return Count(context.folder / "count.json", self.every)


class Count(Callback):
    """Notes which hooks were called, at which step."""

    def __init__(self, path, every):
        self.path, self.every, self.calls = path, every, []

    def on_start(self, run):
        self.calls.append(["start", run.done])

    def on_step_start(self, run, step):
        self.calls.append(["step", step.number])

    def due(self, run):
        return run.done % self.every == 0

    def act(self, run):
        self.calls.append(["act", run.done, int(run.state.step)])

    def on_stop(self, run):
        self.calls.append(["stop", run.done])

    def on_finish(self, run):
        self.calls.append(["finish", run.done])
        self.path.write_text(json.dumps(self.calls))


@dataclass(frozen=True)
class Ramps:
    """Grey ramps of two sizes, whose class is their direction."""

    name: Literal["ramps"] = "ramps"
    count: int = 24
    seed: int = 0

    def origin(self):
        return {"ramps": {"count": self.count, "seed": self.seed}}

    def write(self, folder):
        rng = np.random.default_rng(self.seed)
        with StoreWriter(folder, vae_stride=(1, 1, 1), origin=self.origin()) as writer:
            for number in range(self.count):
                size = (1, 4, 4) if number % 3 else (3, 4, 4)
                ramp = np.linspace(-1, 1, 4)[None, :, None] * np.ones(size)
                clip = np.rot90(ramp, number % 4, axes=(1, 2)) + 0.01 * rng.normal(size=size)
                writer.add(clip[..., None].astype(np.float32), np.array([number % 4]), size)


@dataclass(frozen=True)
class MeanBrightness:
    """The mean of one generated still, beside what it was asked to check."""

    name: Literal["mean_brightness"] = "mean_brightness"
    size: int = 4

    def check(self, model, manifest):
        if self.size % model.patch_size[1]:
            raise InputError(f"evaluators: mean_brightness: size is {self.size}; make it even")

    def evaluate(self, drawing):
        labels = np.zeros((1, drawing.condition_tokens), np.int32)
        key = jax.random.key(drawing.seed)
        still = drawing.draw(drawing.values, key, labels, (1, self.size, self.size))
        return {"mean_brightness": float(np.mean(still))}
