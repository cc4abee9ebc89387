"""Collation of a plan's micro-batches into arrays, bucketed or packed."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from alload_jax.data.batch import AnyBatch
from alload_jax.data.bucketed import BucketedCollation
from alload_jax.data.condition import Conditions
from alload_jax.data.manifest import Manifest
from alload_jax.data.packed import PackedCollation
from alload_jax.data.record import Arrays
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.plan import Plan
from alload_jax.planning.step import MicroBatch


class Collation(Protocol):
    """Collates the samples of micro-batches into arrays."""

    @property
    def conditions(self) -> Conditions:
        """Shape and dtype of the samples' conditions."""
        ...

    def shapes(self, plan: Plan) -> Sequence[AnyBatch]:
        """Returns every micro-batch of a shape group in a plan, as `jax.ShapeDtypeStruct`s.

        Unless ranks are independent, all ranks are one group. The micro-batches that need the most
        memory come first.
        """
        ...

    def empty(self, parts: Sequence[MicroBatch], epoch: int) -> AnyBatch:
        """Builds a micro-batch of a step of `epoch` for the parts of these ranks, weights 0."""
        ...

    def places(self, parts: Sequence[MicroBatch]) -> Iterator[tuple[int, Any]]:
        """Yields each sample of the parts and its place in the batch."""
        ...

    def epoch_of(self, batch: Any, place: Any) -> int:
        """The epoch of the sample at a place of the batch, as `noise_epoch` numbers it."""
        ...

    def put(self, batch: Any, place: Any, sample: int, arrays: Arrays, condition: Any) -> None:
        """Writes the arrays of a sample to its place in the batch, with weight 1.

        Its condition is what `Conditions.of` returns.
        """
        ...


def collation_for(
    plan: Plan, manifest: Manifest, model: ModelConfig, conditions: Conditions
) -> Collation:
    """Returns the collation of a plan's micro-batches."""
    packing = plan.epoch(0).packing
    if packing is None:
        return BucketedCollation.of(plan, manifest, model, conditions)
    return PackedCollation.of(plan, manifest, model, conditions)
