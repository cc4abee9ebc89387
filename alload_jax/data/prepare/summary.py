"""What a prepared data folder holds, as tables."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.prepare.work_folder import Skipped
from alload_jax.planning.geometry import Triple


@dataclass(frozen=True)
class BucketRow:
    """Samples of one size.

    Attributes:
      size: (frames, height, width) in pixels.
      samples: their number.
      tokens: tokens of all of them.
    """

    size: Triple
    samples: int
    tokens: int


def bucket_rows(manifest: Manifest, patch_size: Triple) -> list[BucketRow]:
    """The sizes in a data folder, with tokens for models of that patch size."""
    sizes, counts = np.unique(manifest.shape, axis=0, return_counts=True)
    seq_len = manifest.geometry(patch_size).seq_len(*sizes.T)
    return [
        BucketRow((int(size[0]), int(size[1]), int(size[2])), int(count), int(tokens * count))
        for size, count, tokens in zip(sizes, counts, seq_len, strict=True)
    ]


def video_hours(manifest: Manifest, fps: Fraction) -> float:
    """Hours that all clips take together; images take none."""
    frames = manifest.shape[:, 0]
    return float(frames[frames > 1].sum() / fps) / 3600


def reasons(skipped: Sequence[Skipped]) -> list[tuple[str, int, str]]:
    """(reason, number of files, one of them), the most frequent first; numbers count as alike."""
    kinds = [re.sub(r"\d[\d.,]*", "N", row.reason.split(" (")[0]) for row in skipped]
    example = {kind: row.path for kind, row in zip(reversed(kinds), reversed(skipped), strict=True)}
    counts = sorted(Counter(kinds).items(), key=lambda one: (-one[1], one[0]))
    return [(kind, count, example[kind]) for kind, count in counts]
