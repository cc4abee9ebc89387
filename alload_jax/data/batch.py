"""The arrays of a micro-batch, bucketed or packed."""

from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped
from typing_extensions import TypeVar

from alload_jax.models.common.embedding import ConditionTokens
from alload_jax.models.common.segments import PackedMetadata

T = TypeVar("T", default=jax.Array)
"""Kind of the arrays: those of NumPy where a step is collated, or their shapes or shardings."""


class Batch(NamedTuple, Generic[T]):
    """A bucketed micro-batch: all rows have one shape.

    Attributes:
      latents: [B, frames, height, width, channels] float32.
      condition: [B, L] int32 classes, `num_classes` for the null class; [B, L, width] text
        embeddings; or `ConditionTokens` by name, of one segment a row, for models that declare
        `condition_parts`.
      sample: [B] int32, the samples' numbers in the data folder; −1 for padding.
      epoch: [B] int32, the epoch to which each sample belongs, as `noise_epoch` numbers it.
      weight: [B] float32, 1 for a sample and 0 for padding.
      given: [B, frames, height, width, G] float32, input channels behind the noisy latents; None
        if the model takes none.
      image: [B, N, width], embeddings of the given images; None if the model takes none.
    """

    latents: Float[T, "B frames height width channels"]
    condition: Shaped[T, "B L *width"] | dict[str, ConditionTokens]
    sample: Int[T, " B"]
    epoch: Int[T, " B"]
    weight: Float[T, " B"]
    given: Float[T, "B frames height width G"] | None = None
    image: Float[T, "B N width"] | None = None


class PackedBatch(NamedTuple, Generic[T]):
    """A packed micro-batch: rows of T tokens with up to M segments each.

    A segment is a sample or a part of a split sample. Padding belongs to no segment.

    Attributes:
      tokens: [R, T, patch_dim] float32, patches of the samples, one after another; 0 in padding.
        Those of a split sample are in the order of its tiles, if it has any.
      position: [R, T, 3] int32, the (t, h, w) of each token in its sample; 0 in padding.
      metadata: positions of the segments in T and of their conditions in C.
      condition: [R, C] int32 classes or [R, C, width] text embeddings; or `ConditionTokens` by
        name, whose segments are then those of the conditions.
      sample: [R, M] int32, the samples' numbers in the data folder; −1 in unused slots.
      epoch: [R, M] int32, the epoch to which each sample belongs, as `noise_epoch` numbers it.
      weight: [R, M] float32: 1 for a sample, its fraction of the tokens for a part, 0 in unused
        slots.
      seq_len: [R, M] int32, number of tokens of the segment's sample.
      frame_tokens: [R, M] int32, number of tokens of one latent frame of the segment's sample.
      line_tokens: [R, M] int32, likewise of one line of a frame.
      given: [R, T, patch volume · G] float32, patches of the input channels behind the noisy
        latents; None if the model takes none.
      image: [R, M, N, width], embeddings of the given images; None if the model takes none.
    """

    tokens: Float[T, "R T patch"]
    position: Int[T, "R T 3"]
    metadata: PackedMetadata
    condition: Shaped[T, "R C *width"] | dict[str, ConditionTokens]
    sample: Int[T, "R M"]
    epoch: Int[T, "R M"]
    weight: Float[T, "R M"]
    seq_len: Int[T, "R M"]
    frame_tokens: Int[T, "R M"]
    line_tokens: Int[T, "R M"]
    given: Float[T, "R T G"] | None = None
    image: Float[T, "R M N width"] | None = None


AnyBatch: TypeAlias = Batch[T] | PackedBatch[T]
HostBatch: TypeAlias = AnyBatch[np.ndarray]
Signature = tuple[jax.tree_util.PyTreeDef, tuple[tuple[int, ...], ...]]


def abstract(batch: HostBatch, rows: int) -> Any:
    """The shapes of a batch of one row, with so many rows, as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda part: jax.ShapeDtypeStruct((rows, *part.shape[1:]), part.dtype), batch
    )


def signature(batch: AnyBatch) -> Signature:
    """Returns the static structure of a batch; equal signatures run the same program."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple(tuple(part.shape) for part in leaves)


def describe(batch: AnyBatch) -> str:
    """Describes a batch: `2x17x16x16x1` (latents) or `4 rows of 65,536 tokens` (packed)."""
    if isinstance(batch, PackedBatch):
        rows, tokens = batch.tokens.shape[:2]
        split = batch.metadata.split
        note = f", {split.split_tokens:,} split" if split else ""
        most = "up to " if batch.sample.shape[1] == 1 else ""
        return f"{rows} row{'s' * (rows > 1)} of {most}{tokens:,} tokens{note}"
    return "x".join(map(str, batch.latents.shape))
