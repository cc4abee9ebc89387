"""The arrays of a micro-batch, in either layout."""

from typing import Any, NamedTuple

import jax

from alload_jax.models.common.segments import PackedMetadata


class Batch(NamedTuple):
    """A micro-batch of one shape: the bucketed layout.

    Attributes:
      latents: [B, frames, height, width, channels] float32.
      condition: [B, L] int32 classes, the number of classes standing for none; or [B, L, width]
        text embeddings.
      sample: [B] int32, the manifest's row numbers; −1 for padding.
      weight: [B] float32; 0 for padding.
    """

    latents: Any
    condition: Any
    sample: Any
    weight: Any


class PackedBatch(NamedTuple):
    """Rows of T tokens that hold up to M segments each: the packed layout.

    A segment is a sample, or the part of one that is split over ranks. Padding is in no segment.

    Attributes:
      tokens: [R, T, patch_dim] float32, the samples' patches one after another; 0 in padding.
      position: [R, T, 3] int32, the (t, h, w) of each token in its sample; 0 in padding.
      metadata: where the segments lie, [R, M] in T, and their conditions, [R, M] in C.
      condition: [R, C] int32 classes or [R, C, width] text embeddings.
      sample: [R, M] int32, the manifest's row numbers; −1 in unused slots.
      weight: [R, M] float32; 0 in unused slots; of a part its share of the sample.
      first: [R, M] int32, the number of the segment's first token in its sample.
      seq_len: [R, M] int32, tokens of the segment's whole sample.
    """

    tokens: Any
    position: Any
    metadata: PackedMetadata
    condition: Any
    sample: Any
    weight: Any
    first: Any
    seq_len: Any


AnyBatch = Batch | PackedBatch
Signature = tuple[Any, tuple[tuple[int, ...], ...]]


def signature(batch: AnyBatch) -> Signature:
    """What is static of a batch: batches of equal signature run the same program."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple(tuple(part.shape) for part in leaves)


def describe(batch: AnyBatch) -> str:
    """`2x17x16x16x1` for a bucket's latents, `4 rows of 65,536 tokens` for packed rows."""
    if isinstance(batch, PackedBatch):
        rows, tokens = batch.tokens.shape[:2]
        split = batch.metadata.split
        note = f", {split.region:,} split" if split else ""
        return f"{rows} row{'s' * (rows > 1)} of {tokens:,} tokens{note}"
    return "x".join(map(str, batch.latents.shape))
