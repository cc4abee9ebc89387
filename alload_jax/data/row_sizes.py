"""What is static of packed rows: sizes that hold whatever a plan may put there."""

from dataclasses import dataclass

import numpy as np

from alload_jax.models.segments import Lengths
from alload_jax.planning.plan import Plan

_LONG_CONDITION, _SHORT_CONDITION = 512, 8
"""A row's condition tokens are a multiple of one of these, so that attention can show them to cuDNN
in equal windows: of the first where samples have as many."""
_THINNED = 0.75
"""Lengths are told apart where fewer of the segments are longer."""


@dataclass(frozen=True)
class RowSizes:
    """Of the rows of one program.

    Attributes:
      tokens: T.
      region: A, the first tokens of each row, which hold parts of split samples.
      context: c, ranks of a group, whose regions make one joint row.
      whole: most samples behind the region.
      joint: most samples of a joint row, and parts of samples in a region.
      condition: condition tokens of a row.
      lengths: of the segments of a row.
      whole_lengths: of those behind the region.
      joint_lengths: of those of a joint row.
    """

    tokens: int
    region: int
    context: int
    whole: int
    joint: int
    condition: int
    lengths: Lengths
    whole_lengths: Lengths
    joint_lengths: Lengths

    @property
    def slots(self) -> int:
        """Segments of a row."""
        return self.whole + self.joint


def row_sizes(plan: Plan, condition: int, region: int) -> RowSizes:
    """The sizes of rows whose first `region` tokens hold parts of split samples.

    Args:
      plan: packed.
      condition: condition tokens of a sample.
      region: A, one of the plan's levels.
    """
    epoch = plan.epoch(0)
    packing = epoch.packing
    assert packing is not None
    tokens, whole = int(epoch.padded_len[0]), packing.segments
    joint = packing.region_segments if region else 0
    behind, together = tokens - region, packing.context * region
    seq_len = np.unique(plan.samples.seq_len)
    never_split = seq_len[seq_len <= packing.longest_whole]
    multiple = _LONG_CONDITION if condition >= _LONG_CONDITION else _SHORT_CONDITION
    return RowSizes(
        tokens=tokens,
        region=region,
        context=packing.context,
        whole=whole,
        joint=joint,
        condition=max(1, -(-(whole + joint) * condition // multiple)) * multiple,
        lengths=_lengths(behind, never_split, whole, (region, joint)),
        whole_lengths=_lengths(behind, never_split, whole),
        joint_lengths=_lengths(together, seq_len, joint),
    )


def _lengths(
    tokens: int, seq_len: np.ndarray, samples: int, parts: tuple[int, int] = (0, 0)
) -> Lengths:
    """Of the segments of a row.

    Args:
      tokens: that samples lie in.
      seq_len: lengths of samples, ascending, each once; longer ones than `tokens` lie elsewhere.
      samples: most of them in a row.
      parts: the most tokens of a part of a sample, and most parts, which may lie there besides.
    """
    seq_len = seq_len[seq_len <= tokens]
    longest, count = parts

    def most(above: int) -> int:
        longer = seq_len[np.searchsorted(seq_len, above, side="right") :]
        fit = min(samples, tokens // int(longer[0])) if len(longer) else 0
        return fit + count * (longest > above)

    lengths = [(0, max(1, most(0)))]
    for above in np.unique([*seq_len, max(1, longest), 1]).tolist():
        if (found := most(above)) < _THINNED * lengths[-1][1]:
            lengths.append((above, found))
    return tuple(lengths)
