"""Measures whole runs: the training program itself on a data folder, an epoch or for a time.

Each run is a process of its own. It ends without saving what it trained.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax.profiler import ProfileData
from typing_extensions import override

from alload_jax.bench.harness import provenance
from alload_jax.bench.trace import device_shares
from alload_jax.config import read_config
from alload_jax.data.batch import Signature, signature
from alload_jax.data.loader import PlacedStep
from alload_jax.errors import InputError, out_of_memory
from alload_jax.files import Json
from alload_jax.run.training import run
from alload_jax.training.callbacks import CALLBACKS, CallbackConfig, CallbackContext
from alload_jax.training.loop import Callback, Loop
from alload_jax.training.run_files import is_validation, process_seconds

WARM_UP = 3
"""First steps of a run, which no figure of its steps counts."""
_FEWEST = WARM_UP + 5
"""Steps, of a run that is measured."""
_PROFILED = {"name": "profile", "first": 8, "steps": 6}


class _EnoughError(Exception):
    """Ends a run that was measured for long enough."""


class _Watch(Callback):
    """Ends the run with the first step of its second epoch, or after some steps and seconds."""

    def __init__(self, seconds: float, found: Json):
        self._seconds, self._found = seconds, found
        self._programs: set[Signature] = set()

    @override
    def on_start(self, run: Loop) -> None:
        self._found["ready"] = process_seconds()

    @override
    def on_step_end(self, run: Loop, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        if run.done == WARM_UP:
            self._ends = time.monotonic() + self._seconds
        whole = step.epoch > 0  # by now the metrics of the first are written
        if not whole:
            self._programs.update(map(signature, step.batches))
            # The metrics of the last step are not written.
            if run.done <= _FEWEST or time.monotonic() < self._ends:
                return
        jax.block_until_ready(metrics)
        memory = [device.memory_stats() for device in jax.local_devices()]
        self._found["peak_bytes"] = [each["peak_bytes_in_use"] for each in memory if each] or None
        self._found |= {"whole_epoch": whole, "programs": len(self._programs)}
        raise _EnoughError


def measure(*, argv: list[str], folder: str, seconds: float) -> Json:
    """Trains by a command line until an epoch ends, or for some seconds after the first steps.

    Of a run that ends by time, the last step is not counted.

    Args:
      argv: of `train.py`, without the folder of the run and without callbacks.
      folder: of the run.
      seconds: after which the run ends before its epoch does.

    Returns:
      Provenance and `figures_of` the run; or the error that ended it.

    Raises:
      InputError: the training did.
    """
    found: Json = {}

    @dataclass(frozen=True)
    class Watched(CallbackConfig):
        name: Literal["measured"] = "measured"

        @override
        def make(self, context: CallbackContext) -> Callback:
            return _Watch(seconds, found)

    CALLBACKS.register("measured", Watched)
    callbacks = json.dumps([_PROFILED, {"name": "measured"}])
    fixed = ["--run.folder", folder, "--run.epochs", "2", "--run.steps", "null"]
    fixed += ["--run.compilation_cache", "null"]  # each case compiles all of its programs
    fixed += ["--sampling.prompts", "[]", "--validation.share", "null", "--callbacks", callbacks]
    fixed += ["--trackers", "[]", "--evaluators", "[]", "--checkpoint.every", "null"]
    fixed += ["--checkpoint.minutes", "null"]
    recorded = provenance(["jax", "jaxlib", "flax"]) | {"devices": jax.device_count()}
    try:
        run(read_config([*argv, *fixed], "train.py"), [*argv, *fixed])
    except _EnoughError:
        pass
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return recorded | {"error": "out of memory"}
    ready = found.pop("ready")
    return recorded | found | figures_of(Path(folder), ready)


def figures_of(folder: Path, ready: float) -> Json:
    """What the files of a run say.

    Args:
      folder: of the run.
      ready: seconds from the start of the process to its first step.

    Returns:
      `first_step_seconds` from the start of the process to the end of its first step; `tokens` and
      `samples` of all steps that the epoch ran; their `seconds`, which are `counted_seconds` of the
      `steps` after the warm-up, scaled by predicted cost, since what the warm-up holds differs
      between policies; `tokens_per_second`, `samples_per_second`. Of the counted steps alone:
      `spread`, the range of the tokens per second of fifths of them, as a share of their rate;
      `loss`, mean over the samples of the last fifth; `padding` and predicted `imbalance`, means;
      `variation` of their seconds, standard deviation over mean; the seconds' Pearson correlation
      `with_tokens` and `with_cost` (predicted), None where these are constant. `busy`, `exposed`
      and `idle` are as `device_shares` has them, if the profiler shows GPUs.

    Raises:
      InputError: an epoch has too few steps.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if not is_validation(line) and not line["epoch"]]
    if len(rows) < _FEWEST:
        raise InputError(
            f"an epoch has only {len(rows)} steps, and {_FEWEST} are needed; give more samples"
        )
    names = ("step_seconds", "tokens", "samples", "loss", "padding", "imbalance", "predicted_cost")
    every = np.asarray([[row[name] for name in names] for row in rows])
    seconds, tokens, samples, loss, padding, imbalance, cost = every[WARM_UP:].T
    _, all_tokens, all_samples, *_, all_cost = every.sum(axis=0)
    whole = seconds.sum() * all_cost / cost.sum()
    fifths = np.array_split(np.arange(len(seconds)), 5)
    speeds = np.asarray([tokens[part].sum() / seconds[part].sum() for part in fifths])
    last = fifths[-1]
    found = {
        "first_step_seconds": ready + rows[0]["step_seconds"],
        "seconds": float(whole),
        "counted_seconds": float(seconds.sum()),
        "steps": len(seconds),
        "tokens": int(all_tokens),
        "samples": int(all_samples),
        "tokens_per_second": float(all_tokens / whole),
        "samples_per_second": float(all_samples / whole),
        "spread": float(np.ptp(speeds) * seconds.sum() / tokens.sum()),
        "loss": float(np.average(loss[last], weights=samples[last])),
        "padding": float(padding.mean()),
        "imbalance": float(imbalance.mean()),
        "variation": float(seconds.std() / seconds.mean()),
        "with_tokens": _correlation(seconds, tokens),
        "with_cost": _correlation(seconds, cost),
    }
    for trace in (folder / "profile").rglob("*.xplane.pb"):
        found |= device_shares(ProfileData.from_file(str(trace)))
    return found


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's."""
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) and np.ptp(b) else None
