"""Reads a plan's steps with Grain, in the background, and copies them to the devices.

Storage that is slow is waited for; a step is on the devices while the one before it trains.
"""

import errno
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh
from typing_extensions import override

from alload_jax.data.batch import AnyBatch
from alload_jax.data.collate import HostStep, PlacedStep
from alload_jax.data.sources import SampleReader, SampleSource
from alload_jax.data.store import BadRecordError
from alload_jax.distributed.cluster import Cluster, Consensus, Decision
from alload_jax.errors import InputError, first_line, print_stderr, require_fields, require_positive
from alload_jax.planning.epoch import Step, WindowContent
from alload_jax.planning.plan import Plan
from alload_jax.planning.stream import StreamPlan
from alload_jax.processes import allow_workers, follow_parent, waits
from alload_jax.sharding.mesh import batch_sharding

WAITS = (0.1, 0.5, 2.0)
"""Seconds before the second and later attempts."""

_SHARED_MEMORY = "/dev/shm, which `docker run --shm-size` makes larger,"
"""Where Grain hands over steps."""
_LOWER = "lower data.loader.processes or data.loader.read_ahead"
_REPLACEMENTS = 5
"""Most replacements of worker processes in a row."""


class PatientReader(SampleReader):
    """A `SampleReader` that tries several times before it reports a sample as damaged.

    A sample that stayed damaged is tried once in later epochs.
    """

    def __init__(self, source: SampleSource, waits: Sequence[float] = WAITS):
        self._source, self.manifest = source, source.manifest
        self._waits = tuple(waits)
        self._damaged: set[int] = set()

    def __reduce__(self) -> tuple[type[Self], tuple[SampleSource, tuple[float, ...]]]:
        """Pickles the source for the loader's processes, without what was found."""
        return type(self), (self._source, self._waits)

    @override
    def of_window(self, window: WindowContent) -> Self:
        return type(self)(self._source.of_window(window), self._waits)

    @override
    def read(self, sample: int) -> dict[str, np.ndarray]:
        for wait in () if sample in self._damaged else self._waits:
            try:
                return self._source.read(sample)
            except BadRecordError:
                self._source.close()  # the next attempt opens the files again
                time.sleep(wait)
        try:
            arrays = self._source.read(sample)
        except BadRecordError:
            self._damaged.add(sample)
            raise
        self._damaged.discard(sample)
        return arrays


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
        require_positive("data.loader.", self, "threads", "read_ahead")
        names = "processes max_bad_records"
        require_fields("data.loader.", self, names, lambda value: value >= 0, "0 or more")


def _start_worker(worker: int, workers: int) -> None:
    """Leaves Ctrl-C to the run, which ends workers after saving; they also end if it is killed."""
    del worker, workers
    follow_parent()


@waits("for the loader to read its samples")
class StepLoader(Iterator[HostStep], AbstractContextManager["StepLoader"]):
    """Iterates over collated steps that Grain reads ahead. Close it or use a `with` statement.

    It has no other state than the number of a step, from which a run resumes.
    """

    def __init__(
        self,
        plan: Plan,
        numbers: range,
        collate: Callable[[Step], HostStep],
        config: LoaderConfig,
    ):
        """Begins to read the plan's steps of these numbers, which are consecutive."""
        self._plan, self._numbers, self._collate, self._config = plan, numbers, collate, config
        self._began_again, self._replaced = -1, 0
        self._iterator: Any = self._begin()

    def _begin(self) -> Any:
        import grain  # where it reads: `train.py --help` needs the config alone

        config = self._config
        reading = grain.ReadOptions(
            num_threads=config.threads, prefetch_buffer_size=config.read_ahead
        )
        steps = grain.MapDataset.range(self._numbers.start, self._numbers.stop)
        dataset = steps.map(self._plan.step).map(self._collate).to_iter_dataset(reading)
        if config.processes:
            allow_workers()
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=config.processes, per_worker_buffer_size=config.read_ahead
                ),
                worker_init_fn=_start_worker,
            )
        iterator = iter(dataset)
        iterator.start_prefetch()
        return iterator

    @override
    def __next__(self) -> HostStep:
        """The next step; a worker process that was killed is replaced.

        Raises:
          InputError: no process can begin; its replacement was killed before it gave a step, or the
            last of several in a row, each before it gave as many steps as are read ahead.
        """
        try:
            step = next(self._iterator)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise InputError(  # locks of processes are files there
                f"a process of data.loader cannot begin ({first_line(error)}); where "
                f"{_SHARED_MEMORY} is full, {_LOWER}"
            ) from error
        except RuntimeError as error:
            if not (found := re.search(r"Worker process .*(exit code -?\d+)", str(error))):
                raise
            self.close()
            number, ahead = self._numbers.start, self._config.read_ahead * self._config.processes
            in_a_row = number - self._began_again <= ahead
            self._replaced = self._replaced + 1 if in_a_row else 1
            killed = f"a process of data.loader was killed before step {number + 1} ({found[1]})"
            if self._began_again == number or self._replaced > _REPLACEMENTS:
                of_shared_memory = found[1].endswith(f"{-signal.SIGBUS}")
                full = _SHARED_MEMORY if of_shared_memory else "the host's memory"
                raise InputError(f"{killed}, and again; where {full} is full, {_LOWER}") from error
            print_stderr(f"warning: {killed}; the loader begins again there")
            if isinstance(self._plan, StreamPlan):  # else workers plan from the run's start
                self._plan = self._plan.starting_at(self._plan.round_start(number))
            self._began_again, self._iterator = number, self._begin()
            return next(self)
        self._numbers = self._numbers[1:]
        return step

    @override
    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading ahead."""
        self._iterator.close()


def place_ahead(
    steps: Iterator[HostStep],
    mesh: Mesh,
    depth: int = 1,
    groups: Sequence[Mesh] = (),
    consensus: Consensus | None = None,
) -> Iterator[PlacedStep]:
    """Yields placed steps while the next `depth` steps are being copied.

    Each request first starts the copy of the step that is `depth` later, so that the copy overlaps
    with the computation that was dispatched before.

    Args:
      steps: steps in host memory.
      mesh: mesh of all ranks.
      depth: number of steps to copy ahead.
      groups: mesh of each shape group; empty if all ranks are one group.
      consensus: consensus of the processes on signals and problems; None for a single process.
    """
    consensus = consensus or Consensus(Cluster(), mesh)
    in_flight: deque[tuple[HostStep, tuple[AnyBatch, ...], Callable[[], Decision]]] = deque()
    waited = 0.0
    while True:
        began = time.perf_counter()
        step = next(steps, None)
        waited += time.perf_counter() - began
        if step is not None:
            meshes = [groups[n] for n in step.groups] if groups else [mesh] * len(step.batches)
            batches = tuple(map(place_batch, step.batches, meshes))
            in_flight.append((step, batches, consensus.submit(step.number, step.problems)))
        if not in_flight:
            return
        if step is None or len(in_flight) > depth:
            due, placed, decision = in_flight.popleft()
            problems, signal, save = decision()
            yield PlacedStep(*due[:2], placed, problems, signal, waited, due.groups, save)
            waited = 0.0


def place_batch(batch: AnyBatch[np.ndarray], mesh: Mesh) -> AnyBatch:
    """Copies this process's rows of a batch to its devices; returns the batch of all processes."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda part: jax.make_array_from_process_local_data(sharding, part), batch)
