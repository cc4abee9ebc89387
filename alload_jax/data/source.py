"""The plan as a Grain data source, and the loader that reads ahead of training."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grain
from absl import flags

from alload_jax.data.collate import HostStep
from alload_jax.data.processes import follow_parent, hush_resource_tracker
from alload_jax.errors import InputError
from alload_jax.planning.plan import Plan
from alload_jax.planning.step import Step


@dataclass(frozen=True)
class LoaderConfig:
    """Settings of reading ahead.

    Attributes:
      processes: number of worker processes; 0 reads in threads of the training process.
      threads: number of reading threads (per worker process).
      read_ahead: number of steps kept ready in host memory (per worker process).
      max_bad_records: number of damaged records to skip before the run stops.
    """

    processes: int = 0
    threads: int = 2
    read_ahead: int = 8
    max_bad_records: int = 0

    def __post_init__(self) -> None:
        for name in ("threads", "read_ahead"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"data.loader.{name} is {getattr(self, name)}; it must be at least 1"
                )
        for name in ("processes", "max_bad_records"):
            if getattr(self, name) < 0:
                raise InputError(
                    f"data.loader.{name} is {getattr(self, name)}; it must be 0 or more"
                )


class PlanSource:
    """A Grain RandomAccessDataSource: item i is the plan's step `first + i`.

    There is no other state, so a run resumes from one integer.
    """

    def __init__(self, plan: Plan, first: int, stop: int):
        self._plan = plan
        self._first = first
        self._stop = stop

    def __len__(self) -> int:
        return max(0, self._stop - self._first)

    def __getitem__(self, item: int) -> Step:
        return self._plan.step(self._first + int(item))

    def __repr__(self) -> str:
        return (
            f"PlanSource(plan={self._plan.fingerprint()}, first={self._first}, stop={self._stop})"
        )


def _start_worker(worker: int, workers: int) -> None:
    """Leaves Ctrl-C to the run, which ends workers after saving; they also end if it is killed."""
    del worker, workers
    follow_parent()


class StepLoader:
    """Iterates over collated steps that Grain reads ahead. Close it or use a `with` statement."""

    def __init__(
        self, source: PlanSource, collate: Callable[[Step], HostStep], config: LoaderConfig
    ):
        reading = grain.ReadOptions(
            num_threads=config.threads, prefetch_buffer_size=config.read_ahead
        )
        dataset = grain.MapDataset.source(source).map(collate).to_iter_dataset(reading)
        if config.processes:
            hush_resource_tracker()
            if (
                not flags.FLAGS.is_parsed()
            ):  # Grain's workers need absl's flags, which nothing else parses
                flags.FLAGS.mark_as_parsed()
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=config.processes, per_worker_buffer_size=config.read_ahead
                ),
                worker_init_fn=_start_worker,
            )
        self._iterator: Any = iter(dataset)

    def __iter__(self) -> Iterator[HostStep]:
        return self

    def __next__(self) -> HostStep:
        return next(self._iterator)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading ahead."""
        self._iterator.close()
