"""Finds the samples of a step whose loss or gradient is not finite, and leaves them out of it.

An update whose loss or gradient is not finite changes nothing (`step.apply_gradients`), so that the
step can be computed again for fewer and fewer of its samples. Nothing is kept between the starts of
a run: a resumed run finds the same samples in the same step.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from alload_jax.data.collate import Collator, HostStep
from alload_jax.data.manifest import Manifest
from alload_jax.data.placement import PlacedStep
from alload_jax.data.sources.source import SampleReader
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError
from alload_jax.training.run_files import write_json
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.shape_groups import GroupTrainer
from alload_jax.training.trainer import Trainer

_MOST_NAMED = 8
"""Bad samples of one step beyond which the search ends: then the run diverges."""
_MOST_REPEATS = 3
"""How often a step is repeated."""

Repair = Callable[[int, Mapping[str, float]], PlacedStep]
"""(number of a step, its metrics, of which some are not finite) → the step to run in its place."""


def stop_at(number: int, values: Mapping[str, float], what: str = "") -> NoReturn:
    """Refuses a step whose metrics are not finite.

    Args:
      number: number of the step, from 0.
      values: its metrics.
      what: what is known of its samples.

    Raises:
      InputError: always.
    """
    raise InputError(
        f"step {number + 1}: loss {values.get('loss')}, gradient norm {values.get('grad_norm')}"
        f"{what}. Lower optimizer.learning_rate, or list bad samples in a file and name it as "
        "data.exclude; the last checkpoint is unchanged"
    )


class BadSamples:
    """A `Repair` that leaves out the samples that are not finite by themselves.

    In a cluster, all processes call it for the same steps and find the same samples.
    """

    def __init__(
        self,
        trainer: Trainer | GroupTrainer,
        plan: RunPlan,
        collator: Collator,
        place: Callable[[HostStep], PlacedStep],
        folder: Path,
        most: int,
        progress: Callable[[], None],
    ):
        """Repairs steps of a run.

        Args:
          trainer: what has run the step.
          plan: the plan of the run.
          collator: reads and collates the samples of this process's ranks.
          place: copies a step to the devices; a collective operation.
          folder: folder of the run.
          most: number of bad records that the run may skip.
          progress: called before each computation.
        """
        self._trainer, self._plan, self._collator = trainer, plan, collator
        self._place, self._folder, self._progress = place, folder, progress
        self._most = max(most, _MOST_NAMED)
        self._number, self._repeats = -1, 0
        self._bad: frozenset[int] = frozenset()

    def __call__(self, number: int, values: Mapping[str, float]) -> PlacedStep:
        """Returns a step without the samples that are not finite; they are among its problems.

        Raises:
          InputError: no samples or all of them are to blame; the step is then written to disk.
        """
        if number != self._number:
            self._number, self._repeats, self._bad = number, 0, frozenset()
        self._repeats += 1
        if self._repeats > _MOST_REPEATS:
            self._stop(values, ", and finite in parts")
        remembered = _Remembered(self._collator.reader)
        self._collator = replace(self._collator, reader=remembered)
        samples = self._samples()
        found = self._search(samples, [], values)
        self._bad |= frozenset(found)
        if len(samples) > 1 and len(found) == len(samples):
            self._stop(values, f" for each of its {len(samples)} samples: training diverges")
        if not found:
            print(
                f"warning: step {number + 1}: loss {values.get('loss')} at first, but finite when "
                "computed again; the device may be faulty",
                file=sys.stderr,
                flush=True,
            )
        collate = replace(self._collator, not_finite=self._bad)
        step = self._place(collate(self._plan.plan.step(number)))
        self._collator = replace(self._collator, reader=remembered.reader)
        return step

    def _samples(self) -> list[int]:
        """The distinct samples of the step, in the order of its micro-batches."""
        parts = self._plan.plan.step(self._number).micro_batches
        samples = dict.fromkeys(sample for part in parts for sample in part.samples)
        return [each for each in samples if each not in self._bad | self._collator.excluded]

    def _search(
        self, samples: Sequence[int], found: list[int], values: Mapping[str, float]
    ) -> list[int]:
        """Adds those of `samples` that are not finite to `found`, by halves."""
        if not samples or self._is_finite(samples):
            return found
        if len(found) >= self._most:
            self._stop(values, f" for more than {self._most} samples: training diverges")
        if len(samples) == 1:
            return [*found, *samples]
        before, half = len(found), len(samples) // 2
        found = self._search(samples[:half], found, values)
        found = self._search(samples[half:], found, values)
        if len(found) == before:
            self._stop(values, ", but finite for each of its samples")
        return found

    def _is_finite(self, samples: Sequence[int]) -> bool:
        """Whether loss and gradient are finite for some samples of the step alone."""
        self._progress()
        step, only = self._plan.plan.step(self._number), frozenset(samples)
        parts = step.micro_batches
        indices = {part.index for part in parts if not only.isdisjoint(part.samples)}
        parts = tuple(part for part in parts if part.index in indices)
        others = {sample for part in parts for sample in part.samples} - only
        collate = replace(self._collator, excluded=self._collator.excluded | others)
        return self._trainer.is_finite(self._place(collate(replace(step, micro_batches=parts))))

    def _stop(self, values: Mapping[str, float], what: str) -> NoReturn:
        """Writes the step's samples to disk and raises InputError."""
        path = self._folder / "bad_step.json"
        content = {
            "step": self._number + 1,
            "metrics": {name: str(value) for name, value in values.items()},
            "micro_batches": self._plan.content(self._number),
        }
        write_json(path, content)
        stop_at(self._number, values, f"{what}; its samples are in {path}")


class _Remembered:
    """A `SampleReader` that reads each sample once."""

    def __init__(self, reader: SampleReader):
        self.reader = reader
        self._found: dict[int, dict[str, np.ndarray] | BadRecordError] = {}

    @property
    def manifest(self) -> Manifest:
        """See `SampleReader.manifest`."""
        return self.reader.manifest

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """See `SampleReader.read`."""
        if sample not in self._found:
            try:
                self._found[sample] = self.reader.read(sample)
            except BadRecordError as error:
                self._found[sample] = error
        found = self._found[sample]
        if isinstance(found, BadRecordError):
            raise found
        return found
