"""What all runs of benchmarks/sparse_quality.py share: its data and its programs."""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from moving_pictures import Clips, read_clips
from sparse_quality_clips import HeldOutClips, describe_clips, held_out_clips, write_samples
from sparse_quality_configs import (
    FIRST,
    FIRST_RATE,
    PLAIN,
    first_config,
    plain_config,
    selectors,
    variant_config,
)
from sparse_quality_programs import Compiled, Kind, Sizes, parameter_shapes
from sparse_quality_runs import planned
from sparse_quality_timing import Clock

from alload_jax.bench.provenance import provenance
from alload_jax.config import Config, read_config, values_of
from alload_jax.data.manifest import Manifest, read_manifest
from alload_jax.sharding.mesh import make_mesh
from alload_jax.training.state import Weights

FIRST_SAMPLES = 4000
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Noise levels of held-out losses."""
DRAWS, DRAW_STEPS = 4, 30
"""Clips drawn with the first seed, evaluations of each."""


class Data(NamedTuple):
    """Samples to train on.

    Attributes:
      manifest: of their folder.
      batch: shapes of a micro-batch.
    """

    manifest: Manifest
    batch: Any

    @property
    def rows(self) -> int:
        """Clips of a micro-batch."""
        return len(self.batch.weight)


class Setup(NamedTuple):
    """What all runs of a study share.

    Attributes:
      options: of the command.
      clock: its time limit.
      config: before a variant changes it.
      data: the long clips.
      first: the short ones.
      held_out: clips that no run trains on.
      compiled: the programs.
    """

    options: argparse.Namespace
    clock: Clock
    config: Config
    data: Data
    first: Data
    held_out: HeldOutClips
    compiled: Compiled

    def measure(self, name: str, weights: Weights, part: int = 0) -> np.ndarray:
        """A variant's losses of the first held-out clips, or of the second, [levels, clips]."""
        losses, clips = self.compiled.of(name).losses, self.held_out.part(part)
        return np.asarray(losses(weights, clips, np.asarray(LEVELS, np.float32)))


def set_up(
    options: argparse.Namespace, overrides: list[str], began: float
) -> tuple[Setup, dict[str, Any]]:
    """Writes the data and compiles the programs of training; also the JSON's first entries."""
    clock = Clock(began, options.time_limit)
    config = read_config(["--config", str(options.config), *overrides])
    first = first_config(config, options.first_tokens, options.first_steps)
    mesh = make_mesh(config.mesh)
    clips = read_clips(options.clips)
    clock.log("writing samples")
    shape = (options.frames, options.size, options.size)
    long = _data(options.runs / "data", config, clips, shape, options.samples, mesh)
    short = _data(options.runs / "first", first, clips, tuple(options.first), FIRST_SAMPLES, mesh)
    held_out = held_out_clips(clips, shape, options.held_out, options.show, DRAWS)
    clock.log("compiling")
    kinds = _kinds(options.variants, config, long.batch, parameter_shapes(first, mesh))
    kinds |= {FIRST: Kind(first, short.batch, None)}
    sizes = Sizes(options.held_out, len(LEVELS), DRAWS, DRAW_STEPS, (*shape, 3))
    compiled = Compiled(kinds, sizes, mesh)
    used = [name for name in kinds if name != PLAIN]
    compiled.compile(used, ("gradient", "start", "losses"))
    compiled.compile_updates({FIRST: first}, options.first_steps)
    setup = Setup(options, clock, config, long, short, held_out, compiled)
    return setup, _describe(setup, clips)


def _data(
    folder: Path,
    config: Config,
    clips: Clips,
    shape: tuple[int, int, int],
    number: int,
    mesh: Mesh,
) -> Data:
    """Writes so many crops of a shape."""
    write_samples(folder, clips, shape, number)
    manifest = read_manifest(folder)
    plan, collation = planned(config, manifest, mesh)
    return Data(manifest, collation.shapes(plan)[0])


def _kinds(variants: list[str], config: Config, batch: Any, given: Any) -> dict[str, Kind]:
    """What programs of long clips are compiled for."""
    configs = {name: variant_config(config, name, 1) for name in selectors(variants)}
    configs |= {PLAIN: plain_config(config)}
    return {name: Kind(each, batch, given) for name, each in configs.items()}


def _describe(setup: Setup, clips: Clips) -> dict[str, Any]:
    """What the JSON says before the first run."""
    options, data = setup.options, setup.data
    seq_len = data.manifest.samples(setup.config.model.patch_size).seq_len
    return provenance(["jax", "jaxlib", "flax", "numpy"]) | {
        "command": " ".join(["python", "benchmarks/sparse_quality.py", *sys.argv[1:]]),
        "config": values_of(setup.config),
        "shape": [options.frames, options.size, options.size, 3],
        "tokens": int(seq_len[0]),
        "rows": data.rows,
        "clips": describe_clips(options.clips, clips, setup.held_out.chosen),
        "levels": list(LEVELS),
        "setup_seconds": round(setup.clock.passed(), 1),
        "first": {
            "shape": [*options.first, 3],
            "rows": setup.first.rows,
            "steps": options.first_steps,
            "learning_rate": FIRST_RATE,
            "runs": [],
        },
        "gradient_seconds": {},
        "draws": [],
        "runs": [],
    }
