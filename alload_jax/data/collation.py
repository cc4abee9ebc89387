"""How a plan's micro-batches become arrays: the layouts, and which one a plan has."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from alload_jax.data.batch import AnyBatch
from alload_jax.data.bucketed import BucketedCollation
from alload_jax.data.condition import Conditions
from alload_jax.data.manifest import Manifest
from alload_jax.data.packed import PackedCollation
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.plan import MicroBatch, Plan


class Collation(Protocol):
    """Lays the samples of micro-batches into arrays."""

    @property
    def conditions(self) -> Conditions:
        """How the model takes the samples' conditions."""
        ...

    def shapes(self, plan: Plan) -> Sequence[AnyBatch]:
        """Every micro-batch that a plan can ask of a shape group, as `jax.ShapeDtypeStruct`s.

        Where ranks are not independent, all ranks are one group. Those that need most memory come
        first.
        """
        ...

    def empty(self, parts: Sequence[MicroBatch]) -> AnyBatch:
        """One micro-batch of these ranks' parts in host memory, without samples: weight 0."""
        ...

    def places(self, parts: Sequence[MicroBatch]) -> Iterator[tuple[int, Any]]:
        """Each sample of the parts and its place in the batch."""
        ...

    def put(
        self, batch: Any, place: Any, sample: int, latents: np.ndarray, condition: np.ndarray
    ) -> None:
        """Writes a sample into its place, with weight 1."""
        ...


def collation_for(
    plan: Plan, manifest: Manifest, model: ModelConfig, conditions: Conditions
) -> Collation:
    """The layout of a plan's micro-batches."""
    packing = plan.epoch(0).packing
    if packing is None:
        return BucketedCollation(manifest, conditions)
    return PackedCollation.of(plan, manifest, model, conditions)
