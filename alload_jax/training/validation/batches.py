"""Which held-out samples are measured, and their batches: a bucketed shape for each size."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from alload_jax.data.held_out import content_order
from alload_jax.data.manifest import Manifest
from alload_jax.planning.geometry import Triple
from alload_jax.planning.step import MicroBatch, Step


@dataclass(frozen=True)
class SizeClass:
    """The measured samples of one size.

    Attributes:
      shape: (frames, height, width) in pixels.
      seq_len: tokens of a sample.
      samples: [K] int64, numbers among the held-out samples, in the order of their content.
    """

    shape: Triple
    seq_len: int
    samples: np.ndarray

    @property
    def name(self) -> str:
        """The size as in `17x16x16`: frames, height, width."""
        return "x".join(map(str, self.shape))

    def rows(self, ranks: int, tokens: int | None) -> int:
        """Rows of a rank in a batch.

        Args:
          ranks: number of ranks that share the samples.
          tokens: most tokens of a rank's rows; None for one row.
        """
        room = tokens // self.seq_len if tokens else 1
        return max(1, min(room, -(-len(self.samples) // ranks)))

    def steps(self, ranks: int, tokens: int | None) -> Iterator[Step]:
        """Yields the batches, each as a step of one micro-batch for every rank.

        A rank gets the next samples of the class; the last ranks may have rows without one.
        """
        rows = self.rows(ranks, tokens)
        for index, first in enumerate(range(0, len(self.samples), ranks * rows)):
            parts = []
            for rank in range(ranks):
                begin = first + rank * rows
                samples = tuple(self.samples[begin : begin + rows].tolist())
                parts.append(MicroBatch(rank, 0, rows, self.seq_len, self.shape, samples))
            yield Step(index, 0, tuple(parts))


def choose_samples(
    manifest: Manifest,
    patch_size: Triple,
    max_samples: int | None,
    max_shapes: int | None,
    condition_tokens: int = 0,
) -> list[SizeClass]:
    """Chooses the samples to measure: of the most frequent sizes, each by its share, at least one.

    The choice depends on the samples' content, not on their order.

    Args:
      manifest: the held-out samples.
      patch_size: latents per token.
      max_samples: most samples; None for all.
      max_shapes: most sizes; None for all.
      condition_tokens: tokens of a row beside those of the latents.

    Returns:
      the chosen samples by size, shortest first.
    """
    buckets = manifest.samples(patch_size).buckets()
    sizes = np.diff(buckets.offsets)
    most = min(len(sizes), max_shapes or len(sizes), max_samples or len(sizes))
    kept = np.sort(np.argsort(-sizes, kind="stable")[:most])
    counts = _shares(sizes[kept], max_samples)
    order = content_order(manifest.checksum)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    chosen = []
    for bucket, count in zip(kept.tolist(), counts.tolist(), strict=True):
        members = buckets.members[buckets.offsets[bucket] : buckets.offsets[bucket + 1]]
        first = members[np.argsort(place[members], kind="stable")][:count]
        frames, height, width = buckets.shape[bucket].tolist()
        tokens = int(buckets.seq_len[bucket]) + condition_tokens
        chosen.append(SizeClass((frames, height, width), tokens, first))
    return chosen


def _shares(sizes: np.ndarray, most: int | None) -> np.ndarray:
    """Divides `most` places by size, at least one each: the largest remainder first.

    Args:
      sizes: [K] int64, at most `most` of them.
      most: places in all; None for as many as there are.

    Returns:
      [K] int64, at most `sizes`.
    """
    if most is None or sizes.sum() <= most:
        return sizes
    exact = 1 + (sizes - 1) * ((most - len(sizes)) / max(1, (sizes - 1).sum()))
    counts = np.floor(exact).astype(np.int64)
    left = np.argsort(counts - exact, kind="stable")[: most - counts.sum()]
    counts[left] += 1
    return counts
