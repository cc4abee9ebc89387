"""The arrays of a micro-batch, in either layout."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from alload_jax.models.common.segments import Lengths, Segments, SplitRows


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


@dataclass(frozen=True)
class Bounds:
    """What is static of the samples in packed rows.

    Attributes:
      grid: (t, h, w) in tokens of the largest sample along each; no position reaches it.
      lengths: of the segments of tokens.
      condition: most condition tokens of a segment.
    """

    grid: tuple[int, int, int]
    lengths: Lengths
    condition: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        *("tokens", "position", "segments", "condition", "condition_segments"),
        *("sample", "weight", "first", "seq_len", "split"),
    ),
    meta_fields=("bounds",),
)
@dataclass(frozen=True)
class PackedBatch:
    """Rows of T tokens that hold up to M segments each: the packed layout.

    Every token belongs to a segment. A segment is a sample, the part of one that is split over
    ranks, or padding of weight 0.

    Attributes:
      tokens: [R, T, patch_dim] float32, the samples' patches one after another; 0 for padding.
      position: [R, T, 3] int32, the (t, h, w) of each token in its sample; 0 for padding.
      segments: where samples and padding lie, [R, M] in T.
      condition: [R, C] int32 classes or [R, C, width] text embeddings.
      condition_segments: where the segments' conditions lie, [R, M] in C.
      sample: [R, M] int32, the manifest's row numbers; −1 for padding and unused slots.
      weight: [R, M] float32; 0 for padding and unused slots; of a part its share of the sample.
      first: [R, M] int32, the number of the segment's first token in its sample.
      seq_len: [R, M] int32, tokens of the segment's whole sample.
      split: where split samples lie; None in programs without them.
      bounds: static.
    """

    tokens: Any
    position: Any
    segments: Segments
    condition: Any
    condition_segments: Segments
    sample: Any
    weight: Any
    first: Any
    seq_len: Any
    split: SplitRows | None
    bounds: Bounds


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
        split = f", {batch.split.region:,} split" if batch.split else ""
        return f"{rows} row{'s' * (rows > 1)} of {tokens:,} tokens{split}"
    return "x".join(map(str, batch.latents.shape))
