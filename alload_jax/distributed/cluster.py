"""The processes of a run as one of them sees them, and how they exchange values.

A signal reaches the processes at different moments, and only one process reads a given record.
Before each step every process submits what it knows to a small all-reduce. The devices compute it
during the step before, and its result is read when the step is due. So no process waits, and all
processes get the same result for the same step.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alload_jax.distributed.coordination import KeyValueStore, ProcessInfo, Seal
from alload_jax.errors import USER_ERRORS, InputError, run_command
from alload_jax.processes import FOR_OTHERS, waits
from alload_jax.sharding.mesh import AXES, replicated

if TYPE_CHECKING:
    from alload_jax.distributed.heartbeat import Heartbeat

T = TypeVar("T")


def first_process() -> bool:
    """Whether this process prints and writes files: process 0, or the only process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


class Cluster:
    """The processes of the run; most runs have a single one.

    Use it in a `with` statement. If an error leaves the `with`, the process prints the error and
    exits at once: a regular exit of Python would make JAX wait for the other processes.

    Attributes:
      num_processes: number of processes of the run.
      process_id: number of this one.
      store: what they share; None for a single process.
      heartbeat: finds lost processes and tells the others of this one; None for a single process.
      calls: number of collective operations so far.
    """

    def __init__(
        self, process: ProcessInfo | None = None, lost_after: float = 30.0, seal: Seal | None = None
    ):
        """Call it after `connect`, with a seal; without `process` there is a single process."""
        self.num_processes = process.num_processes if process else 1
        self.process_id = process.process_id if process else 0
        self.store: KeyValueStore | None = None
        self.heartbeat: Heartbeat | None = None
        if process and seal:
            self.store = KeyValueStore(seal)
            from alload_jax.distributed import heartbeat  # one process needs none

            self.heartbeat = heartbeat.Heartbeat(self.store, process, lost_after)
        self.calls = 0
        self._status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.heartbeat is None:
            return
        if error is not None:
            self.heartbeat.report_failure(error)
            status = _print_error(error) if self._status is None else self._status
            self.heartbeat.exit_process(status)
        self.all_gather(None)
        self.heartbeat.close()
        jax.distributed.shutdown()

    @contextmanager
    def report_failures(self) -> Iterator[None]:
        """Reports an error to the other processes and to the user before cleanup can block."""
        try:
            yield
        except BaseException as error:
            if self.heartbeat:
                self.heartbeat.report_failure(error)
                self._status = _print_error(error)
            raise

    def broadcast(self, compute: Callable[[], T]) -> T:
        """Calls `compute` in process 0 and returns its result in all processes.

        A collective operation: the other processes wait for process 0. The result is a JSON value.
        """
        if self.store is None:
            return compute()
        self.calls += 1
        key = f"broadcast/{self.calls}"
        if self.process_id == 0:
            self.store.put(key, json.dumps(compute()))
        return json.loads(self.store.wait_for(key))

    def all_gather(self, value: T) -> list[T]:
        """Returns the values of all processes, ordered by process. Values are JSON values.

        A collective operation: all processes wait for the last.
        """
        if self.store is None:
            return [value]
        self.calls += 1
        prefix = f"all_gather/{self.calls}"
        self.store.put(f"{prefix}/{self.process_id}", json.dumps(value))
        keys = [f"{prefix}/{process}" for process in range(self.num_processes)]
        return [json.loads(self.store.wait_for(key)) for key in keys]

    def require_same(self, values: Mapping[str, object], remedy: str) -> None:
        """Checks that all processes have the same values. A collective operation.

        Args:
          values: JSON values by name.
          remedy: what the user should do if they differ.

        Raises:
          InputError: a process has another value than process 0, or another number of processes.
        """
        expected = self.broadcast(lambda: self.num_processes)
        if expected != self.num_processes:
            raise InputError(
                f"cluster.processes is {self.num_processes}, but {expected} in process 0; start "
                "all processes with the same number"
            )
        first, *others = self.all_gather(values)
        for process, theirs in enumerate(others, 1):
            for name in sorted(first.keys() | theirs.keys()):
                value, wanted = theirs.get(name), first.get(name)
                if value != wanted:
                    raise InputError(
                        f"process {process} of {self.num_processes}: {name} is {value!r}, but "
                        f"{wanted!r} in process 0; {remedy}"
                    )


def _print_error(error: BaseException) -> int:
    """Prints an error as a command does; returns the exit status."""
    if not isinstance(error, USER_ERRORS):
        traceback.print_exception(error)
        return 1

    def fail(_: list[str]) -> NoReturn:
        raise error

    return run_command(fail, sys.argv)


class Decision(NamedTuple):
    """What all processes know of a step.

    Attributes:
      problems: damaged records of the step, read by any process, one text each.
      signal: number of a reason to stop, such as a signal, that some process had before the step;
        0 for none.
      save: whether some process wanted a checkpoint after the step.
    """

    problems: tuple[str, ...]
    signal: int
    save: bool


@waits(FOR_OTHERS)
class Consensus:
    """Takes decisions together with the other processes of the cluster, if there are any."""

    def __init__(
        self,
        cluster: Cluster,
        mesh: Mesh,
        signal: Callable[[], int] = lambda: 0,
        wants_save: Callable[[], bool] = lambda: False,
    ):
        """Decides for the steps of a run.

        Args:
          cluster: the processes.
          mesh: all devices.
          signal: returns the number of this process's reason to stop, such as a signal, or 0.
          wants_save: returns whether this process wants a checkpoint.
        """
        self._cluster, self._signal, self._wants_save = cluster, signal, wants_save
        self._prefix = f"problems/{cluster.calls}"  # a second run has steps of these numbers too
        self._row_sharding = NamedSharding(mesh, PartitionSpec(AXES))
        self._num_rows = sum(
            device.process_index == jax.process_index() for device in mesh.devices.flat
        )
        self._max = jax.jit(lambda rows: rows.max(axis=0), out_shardings=replicated(mesh))

    def submit(self, step: int, problems: tuple[str, ...]) -> Callable[[], Decision]:
        """Submits what this process knows of a step. Does not wait; a collective operation.

        Returns:
          A function that gives the decision, once the step is due; it waits for its all-reduce.
        """
        save, store, heartbeat = self._wants_save(), self._cluster.store, self._cluster.heartbeat
        if store is None or heartbeat is None:
            return lambda: Decision(problems, self._signal(), save)
        if problems:
            store.put(f"{self._prefix}/{step}/{self._cluster.process_id}", json.dumps(problems))
        row = np.array([[len(problems), self._signal(), save]], np.int32)
        rows = jax.make_array_from_process_local_data(
            self._row_sharding, row.repeat(self._num_rows, axis=0)
        )
        maximum = self._max(rows)

        @waits(FOR_OTHERS)
        def decision() -> Decision:
            heartbeat.step = step + 1
            damaged, signal, wanted = np.asarray(maximum).tolist()
            found = store.get_prefix(f"{self._prefix}/{step}") if damaged else {}
            texts = [text for n in sorted(found, key=int) for text in json.loads(found[n])]
            return Decision(tuple(dict.fromkeys(texts)), signal, bool(wanted))

        return decision

    def signal(self) -> int:
        """Returns the largest number of a reason to stop of all processes; waits for all."""
        return max(self._cluster.all_gather(self._signal()))
