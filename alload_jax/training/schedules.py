"""Schedules of the learning rate: linear warm-up, then a curve over the schedule's own length."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from alload_jax.errors import InputError

ScheduleName = Literal["cosine", "constant", "linear", "wsd"]
DecayShape = Literal["linear", "sqrt"]


@dataclass(frozen=True)
class Curve:
    """A learning rate over steps.

    Attributes:
      name: `cosine` and `linear` fall from the peak after the warm-up to the end of the schedule,
        `constant` stays at the peak, and `wsd` stays there until its decay (arXiv 2404.06395).
      peak: learning rate after the warm-up.
      warmup_steps: number of steps of linear warm-up; the first step has 1 / warmup_steps of the
        peak.
      final_fraction: learning rate at the end, as a fraction of the peak.
      decay_steps: number of steps of the decay of `wsd`; None for `decay_fraction`.
      decay_fraction: the same as a fraction of the schedule's length.
      decay_shape: shape of that decay: `linear`, or `sqrt` for 1 − √progress (arXiv 2405.18392).
    """

    name: ScheduleName
    peak: float
    warmup_steps: int
    final_fraction: float
    decay_steps: int | None
    decay_fraction: float
    decay_shape: DecayShape

    def schedule(self, steps: int) -> optax.Schedule:
        """Returns the schedule over `steps` optimizer steps; later steps have its last value.

        Raises:
          InputError: warm-up and decay of `wsd` are longer than the schedule.
        """
        if self.name == "cosine":
            return optax.warmup_cosine_decay_schedule(
                init_value=self.peak / max(1, self.warmup_steps),
                peak_value=self.peak,
                warmup_steps=self.warmup_steps,
                decay_steps=max(steps, self.warmup_steps + 1),
                end_value=self.peak * self.final_fraction,
            )
        warmup = optax.linear_schedule(
            self.peak / max(1, self.warmup_steps), self.peak, self.warmup_steps
        )
        return optax.join_schedules([warmup, self._after_warmup(steps)], [self.warmup_steps])

    def _after_warmup(self, steps: int) -> optax.Schedule:
        end = self.peak * self.final_fraction
        if self.name == "constant":
            return optax.constant_schedule(self.peak)
        if self.name == "linear":
            return optax.linear_schedule(self.peak, end, max(1, steps - self.warmup_steps))
        decay = self._steps_of_decay(steps)
        stable = steps - decay - self.warmup_steps
        falling = _one_minus_sqrt if self.decay_shape == "sqrt" else optax.linear_schedule
        return optax.join_schedules(
            [optax.constant_schedule(self.peak), falling(self.peak, end, decay)], [stable]
        )

    def _steps_of_decay(self, steps: int) -> int:
        decay = self.decay_steps or max(1, round(self.decay_fraction * steps))
        if self.warmup_steps + decay > steps:
            raise InputError(
                f"optimizer.warmup_steps is {self.warmup_steps} and the decay of "
                f"optimizer.schedule wsd takes {decay} steps, more than the {steps} of the "
                "schedule; lower optimizer.warmup_steps, optimizer.decay_steps or "
                "optimizer.decay_fraction"
            )
        return decay


def _one_minus_sqrt(peak: float, end: float, steps: int) -> optax.Schedule:
    """Falls from `peak` to `end` over `steps` as 1 − √progress."""

    def schedule(count: jax.Array) -> jax.Array:
        progress = jnp.clip(jnp.asarray(count, jnp.float32) / steps, 0.0, 1.0)
        return end + (peak - end) * (1 - jnp.sqrt(progress))

    return schedule
