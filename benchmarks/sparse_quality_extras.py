"""What benchmarks/sparse_quality.py can do without: what lists hold, samples, the plain model."""

from typing import Any, NamedTuple

import numpy as np
from sparse_quality_clips import to_bytes
from sparse_quality_configs import PLAIN, selectors
from sparse_quality_measures import NOISE_SEED
from sparse_quality_record import Record, rounded
from sparse_quality_setup import DRAW_STEPS, DRAWS, Setup
from sparse_quality_timing import EXTRA_SECONDS, gradient_seconds

from alload_jax.diffusion.schedules import noise_levels
from alload_jax.training.state import Weights

LIST_LEVELS = (0.3, 0.7)
"""Noise levels at which the attention is measured that lists hold."""
DRAW_LEVEL = 0.7
"""Noise level that clips restart from."""


class Trained(NamedTuple):
    """A run that has ended.

    Attributes:
      variant: its name.
      seed: of the run.
      weights: the last ones.
      entry: what the JSON says of it.
    """

    variant: str
    seed: int
    weights: Weights
    entry: dict[str, Any]


def add_extras(setup: Setup, record: Record, trained: list[Trained], given: Any) -> None:
    """Adds what the study can do without, in the time that is left.

    Args:
      setup: of the study.
      record: what it found so far.
      trained: its runs.
      given: parameters to start from.
    """
    clock, compiled = setup.clock, setup.compiled
    if clock.left() < EXTRA_SECONDS:
        clock.log("no time left for samples, lists and the model without sparse attention")
        return
    clock.log("compiling the rest")
    compiled.compile(selectors(setup.options.variants), ("draw", "mass"))
    clock.log("measuring what lists hold")
    for run in trained:
        run.entry["lists"] = _mass_of_lists(setup, run)
    record.write()
    clock.log("drawing samples")
    for run in trained:
        if run.seed == setup.options.seeds[0]:
            record.add_drawn(run.variant, _drawn(setup, run))
    record.write()
    record.draw()
    if clock.left() > EXTRA_SECONDS / 2:
        _time_plain(setup, record, given)


def _mass_of_lists(setup: Setup, run: Trained) -> list[dict[str, Any]]:
    """What the attention and the lists of a run's layers hold, at each of LIST_LEVELS."""
    mass, clips = setup.compiled.of(run.variant).mass, setup.held_out.part(0)
    found = [mass(run.weights, clips, np.float32(at)) for at in LIST_LEVELS]
    return [{key: rounded(each[key]) for key in each} for each in found]


def _drawn(setup: Setup, run: Trained) -> dict[str, np.ndarray]:
    """Clips drawn from noise, held-out clips restored from noise, and these before."""
    draw, pixels = setup.compiled.of(run.variant).draw, setup.held_out.pixels
    shape = (DRAWS, *pixels.shape[1:])
    noise = np.random.default_rng(NOISE_SEED).standard_normal(shape, np.float32)
    levels = noise_levels("euler", DRAW_STEPS, 1.0)
    drawn = np.asarray(draw(run.weights, noise, levels))
    true = pixels[setup.held_out.shown]
    noised = (1 - DRAW_LEVEL) * (true / np.float32(127.5) - 1) + DRAW_LEVEL * noise
    restored = np.asarray(draw(run.weights, noised, levels * np.float32(DRAW_LEVEL)))
    return {
        f"{run.variant}_drawn": to_bytes(drawn),
        f"{run.variant}_restored": to_bytes(restored),
        "true": true,
        "noised": to_bytes(noised),
    }


def _time_plain(setup: Setup, record: Record, given: Any) -> None:
    """Adds the seconds of a model that measures nothing."""
    setup.compiled.compile([PLAIN], ("gradient", "start"))
    found = gradient_seconds(setup.compiled, PLAIN, given)
    record.content["gradient_seconds"][PLAIN] = found
    setup.clock.log(f"{PLAIN}: {found}")
