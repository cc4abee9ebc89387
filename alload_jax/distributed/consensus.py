"""Decisions that all processes must take at the same step: when to stop or save, what to skip.

A signal reaches the processes at different moments, and only one process reads a given record.
Before each step every process submits what it knows to a small all-reduce. The devices compute it
during the step before, and its result is read when the step is due. So no process waits, and all
processes get the same result for the same step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alload_jax.distributed.cluster import Cluster
from alload_jax.sharding.mesh import AXES, replicated


class PendingDecision(NamedTuple):
    """A decision on a later step whose all-reduce is still under way.

    Attributes:
      step: number of the step.
      problems: damaged records that this process has read for the step, one text each.
      save: whether this process wants a checkpoint after the step.
      maximum: [3] int32, the largest count of damaged records, the largest number of a reason to
        stop, and whether a checkpoint is wanted, over all processes; None for a single process.
    """

    step: int
    problems: tuple[str, ...]
    save: bool
    maximum: jax.Array | None


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
        self._row_sharding = NamedSharding(mesh, PartitionSpec(AXES))
        self._num_rows = sum(
            device.process_index == jax.process_index() for device in mesh.devices.flat
        )
        self._max = jax.jit(lambda rows: rows.max(axis=0), out_shardings=replicated(mesh))

    def submit(self, step: int, problems: tuple[str, ...]) -> PendingDecision:
        """Submits what this process knows of a step. Does not wait; a collective operation."""
        save = self._wants_save()
        if self._cluster.num_processes == 1:
            return PendingDecision(step, problems, save, None)
        self._cluster.publish_problems(step, problems)
        row = np.array([[len(problems), self._signal(), save]], np.int32)
        rows = jax.make_array_from_process_local_data(
            self._row_sharding, row.repeat(self._num_rows, axis=0)
        )
        return PendingDecision(step, problems, save, self._max(rows))

    def result(self, pending: PendingDecision) -> Decision:
        """Returns the decision, once the step is due; waits for its all-reduce."""
        self._cluster.set_step(pending.step + 1)
        if pending.maximum is None:
            return Decision(pending.problems, self._signal(), pending.save)
        damaged, signal, save = np.asarray(pending.maximum).tolist()
        problems = self._cluster.all_problems(pending.step) if damaged else ()
        return Decision(problems, signal, bool(save))

    def signal(self) -> int:
        """Returns the largest number of a reason to stop of all processes; waits for all."""
        return max(self._cluster.all_gather(self._signal()))
