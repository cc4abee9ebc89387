"""What all processes must decide alike: when to stop, and which records are damaged.

A signal comes to processes at different moments, and a record is read by one of them. Before a step
each process contributes what it knows to a small collective, which is computed on the devices while
the step before is, and read when the step is due: so no process waits, and all learn the same at
the same step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alload_jax.distributed.cluster import Cluster
from alload_jax.sharding.mesh import AXES, replicated


class Proposal(NamedTuple):
    """What this process knows of a step that is to come.

    Attributes:
      step: its number.
      problems: what was wrong with records that this process has read for it.
      most: [2] int32, over all processes: damaged records, signal. None for a lone process.
    """

    step: int
    problems: tuple[str, ...]
    most: jax.Array | None


class Agreed(NamedTuple):
    """What all processes know of a step.

    Attributes:
      problems: what was wrong with its records, whoever read them.
      signal: number of the signal that a process was told to stop by before it; 0 for none.
    """

    problems: tuple[str, ...]
    signal: int


class Consensus:
    """Agrees with the other processes; without others, with itself."""

    def __init__(self, cluster: Cluster, mesh: Mesh, signal: Callable[[], int] = lambda: 0):
        """`signal` gives the number of the signal that has come to this process, or 0."""
        self._cluster, self._signal = cluster, signal
        self._split = NamedSharding(mesh, PartitionSpec(AXES))
        self._rows = sum(
            device.process_index == jax.process_index() for device in mesh.devices.flat
        )
        self._most = jax.jit(lambda rows: rows.max(axis=0), out_shardings=replicated(mesh))

    def propose(self, step: int, problems: tuple[str, ...]) -> Proposal:
        """Contributes what this process knows, without waiting; all processes in the same order."""
        if self._cluster.processes == 1:
            return Proposal(step, problems, None)
        self._cluster.report(step, problems)
        row = np.array([[len(problems), self._signal()]], np.int32)
        rows = jax.make_array_from_process_local_data(self._split, row.repeat(self._rows, axis=0))
        return Proposal(step, problems, self._most(rows))

    def settle(self, proposal: Proposal) -> Agreed:
        """What all have contributed, once the step is due."""
        self._cluster.reached(proposal.step + 1)
        if proposal.most is None:
            return Agreed(proposal.problems, self._signal())
        damaged, signal = np.asarray(proposal.most).tolist()
        return Agreed(self._cluster.reported(proposal.step) if damaged else (), signal)

    def signal(self) -> int:
        """The signal that any process has got until now; waits for all."""
        return max(self._cluster.all_gather(self._signal()))
