"""Copies steps from host memory to the devices, one step ahead of training."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from alload_jax.data.batch import AnyBatch
from alload_jax.data.collate import HostStep
from alload_jax.distributed.cluster import Cluster, Consensus, PendingDecision
from alload_jax.sharding.mesh import batch_sharding


class PlacedStep(NamedTuple):
    """A step whose arrays are on the devices or being copied there.

    Attributes:
      number: number of the step, counted from the start of training.
      epoch: epoch of the step.
      batches: one batch per micro-batch, with rows split over the ranks (of its shape group).
      problems: errors of the records that were skipped, in all processes.
      signal: number of the signal that stops the run before this step; 0 for none.
      wait_seconds: seconds of waiting for the loader when this step was requested; the loader then
        returned the step `depth` later.
      groups: shape group of each batch.
      save: whether a process wants a checkpoint after this step.
    """

    number: int
    epoch: int
    batches: tuple[AnyBatch, ...]
    problems: tuple[str, ...]
    signal: int
    wait_seconds: float
    groups: tuple[int, ...] = ()
    save: bool = False


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
    in_flight: deque[tuple[HostStep, tuple[AnyBatch, ...], PendingDecision]] = deque()
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
            due, placed, proposal = in_flight.popleft()
            problems, signal, save = consensus.result(proposal)
            yield PlacedStep(*due[:2], placed, problems, signal, waited, due.groups, save)
            waited = 0.0


def place_batch(batch: AnyBatch[np.ndarray], mesh: Mesh) -> AnyBatch:
    """Copies this process's rows of a batch to its devices; returns the batch of all processes."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda part: jax.make_array_from_process_local_data(sharding, part), batch)
