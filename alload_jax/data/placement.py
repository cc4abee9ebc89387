"""From host memory to the devices, one step ahead of training."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from alload_jax.data.batch import AnyBatch
from alload_jax.data.collate import HostStep
from alload_jax.distributed.cluster import Cluster
from alload_jax.distributed.consensus import Consensus, PendingDecision
from alload_jax.sharding.mesh import batch_sharding


class PlacedStep(NamedTuple):
    """A step whose arrays are on (or on their way to) the devices.

    Attributes:
      number: of the step, from the start of training.
      epoch: of the step.
      batches: one for each micro-batch, rows split over the ranks (of its shape group).
      problems: what was wrong with records that were skipped, in whatever process.
      signal: number of the signal by which a process was told to stop before it; 0 for none.
      wait_seconds: how long the loader was waited for when this step was asked for; the data
        that came then are those of the step `depth` further on.
      groups: the shape group of each batch.
    """

    number: int
    epoch: int
    batches: tuple[AnyBatch, ...]
    problems: tuple[str, ...]
    signal: int
    wait_seconds: float
    groups: tuple[int, ...] = ()


def place_ahead(
    steps: Iterator[HostStep],
    mesh: Mesh,
    depth: int = 1,
    groups: Sequence[Mesh] = (),
    consensus: Consensus | None = None,
) -> Iterator[PlacedStep]:
    """Yields placed steps, `depth` further ones already travelling while each is used.

    Asking for a step first sends off the one that comes `depth` after it, so that the copy runs
    beside the computation that was dispatched before.

    Args:
      steps: in host memory.
      mesh: of all ranks.
      depth: steps that travel.
      groups: the mesh of each shape group; none where all ranks are one.
      consensus: of the processes, on what travels along; None for a lone one.
    """
    consensus = consensus or Consensus(Cluster(), mesh)
    travelling: deque[tuple[HostStep, tuple[AnyBatch, ...], PendingDecision]] = deque()
    waited = 0.0
    while True:
        began = time.perf_counter()
        step = next(steps, None)
        waited += time.perf_counter() - began
        if step is not None:
            meshes = [groups[n] for n in step.groups] if groups else [mesh] * len(step.batches)
            batches = tuple(map(_place, step.batches, meshes))
            travelling.append((step, batches, consensus.submit(step.number, step.problems)))
        if not travelling:
            return
        if step is None or len(travelling) > depth:
            due, placed, proposal = travelling.popleft()
            agreed = consensus.result(proposal)
            yield PlacedStep(*due[:2], placed, *agreed, waited, due.groups)
            waited = 0.0


def _place(batch: AnyBatch, mesh: Mesh) -> AnyBatch:
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda part: jax.make_array_from_process_local_data(sharding, part), batch)
