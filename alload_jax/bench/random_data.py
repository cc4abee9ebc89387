"""Samples of given sizes with random latents and conditions, for measurements of steps."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import Conditions, conditions_for, form_for
from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LABELS, LATENTS, TEXT
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.architecture import LABEL_TOKENS
from alload_jax.planning.plan import Plan
from alload_jax.planning.samples import Geometry, Samples


class RandomReader:
    """Replaces `StoreReader`: the arrays of every record are parts of one random array."""

    def __init__(self, manifest: Manifest, conditions: Conditions):
        """Draws a random array of the size of the largest sample."""
        self.manifest = manifest
        rng = np.random.default_rng(0)
        shapes = np.unique(manifest.shape, axis=0)
        largest = max(math.prod(manifest.latent_shape(tuple(shape))) for shape in shapes)
        self._latents = rng.standard_normal(largest, np.float32)
        self._condition: dict[str, np.ndarray] = {LABELS: np.zeros(1, np.int32)}
        if conditions.text_dim is not None:
            text = rng.standard_normal((conditions.length, conditions.text_dim), np.float32)
            self._condition = {TEXT: text.astype(conditions.dtype)}
        for part in conditions.parts:
            tokens = rng.standard_normal((part.length, part.width), np.float32)
            self._condition[part.name] = tokens.astype(conditions.dtype)
        if (image := conditions.image()) is not None:
            self._condition[IMAGE] = rng.standard_normal(image.shape, np.float32)

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Random latents of the sample's shape and a random condition."""
        shape = self.manifest.latent_shape(tuple(self.manifest.shape[sample]))
        arrays = {LATENTS: self._latents[: math.prod(shape)].reshape(shape)} | self._condition
        if channels := self.manifest.form.given_channels:
            arrays[GIVEN] = np.zeros((*shape[:3], channels), np.float32)
        return arrays


def manifest_of(samples: Samples, model: ModelConfig) -> Manifest:
    """A manifest of the samples, without files on disk."""
    count, none = len(samples), np.zeros(len(samples), np.int64)
    form = form_for(model)
    # All tokens of each further kind of condition, for each sample.
    lengths = {part.name: part.length for part in model.condition_parts()}
    further = np.asarray([lengths[name] for name, _ in form.parts], np.int32)
    return Manifest(
        path=Path("random"),
        shard=np.full(count, "random", object),
        index=none,
        shape=samples.shape,
        channels=np.full(count, model.latent_channels),
        text_length=np.full(count, model.text.length if model.text else LABEL_TOKENS),
        checksum=none,
        vae_stride=Geometry().vae_stride,
        form=form,
        shard_bytes={},
        origin={},
        part_lengths=np.tile(further, (count, 1)) if form.parts else None,
    )


def random_collator(plan: Plan, model: ModelConfig) -> Collator:
    """Makes the arrays of a plan's steps from random latents and conditions; and their shapes."""
    manifest = manifest_of(plan.samples, model)
    conditions = conditions_for(model, manifest)
    reader: Any = RandomReader(manifest, conditions)
    collation = collation_for(plan, manifest, model, conditions)
    ranks = frozenset(range(plan.topology.ranks))
    return Collator(reader, ranks, collation, plan.group_ranks)
