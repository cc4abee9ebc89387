"""What is static of packed rows: sizes that hold whatever a plan may put there."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alload_jax.models.common.segments import Lengths
from alload_jax.planning.plan import Plan

_LONG_CONDITION, _SHORT_CONDITION = 512, 8
"""A row's condition tokens are a multiple of one of these, so that attention can show them to cuDNN
in equal windows: of the first where samples have as many."""
THINNED = 0.75
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
    of_whole = _Stretch(behind, never_split, whole)
    of_parts = _Stretch(region, seq_len, joint, cut=2)
    multiple = _LONG_CONDITION if condition >= _LONG_CONDITION else _SHORT_CONDITION
    return RowSizes(
        tokens=tokens,
        region=region,
        context=packing.context,
        whole=whole,
        joint=joint,
        condition=max(1, -(-(whole + joint) * condition // multiple)) * multiple,
        lengths=_lengths(of_whole, of_parts),
        whole_lengths=_lengths(of_whole),
        joint_lengths=_lengths(_Stretch(together, seq_len, joint)),
    )


class _Stretch(NamedTuple):
    """Of a row.

    Attributes:
      tokens: of it.
      seq_len: lengths of the samples that lie there, ascending, each once.
      samples: most of them.
      cut: of its ends, those over which samples may reach.
    """

    tokens: int
    seq_len: np.ndarray
    samples: int
    cut: int = 0

    def longer(self, above: int) -> int:
        """Most segments of more than `above` tokens."""
        longer = self.seq_len[np.searchsorted(self.seq_len, above, side="right") :]
        if not len(longer):
            return 0
        fit = self.tokens // int(longer[0]) + self.cut
        return min(self.samples, fit, self.tokens // (above + 1))


def _lengths(*stretches: _Stretch) -> Lengths:
    """Of the segments of a row of these stretches."""
    lengths = [(0, max(1, sum(of.longer(0) for of in stretches)))]
    bounds = np.concatenate(
        [[1, *(of.tokens for of in stretches)], *(of.seq_len for of in stretches)]
    )
    for above in np.unique(bounds[bounds > 0]).tolist():
        if (found := sum(of.longer(above) for of in stretches)) < THINNED * lengths[-1][1]:
            lengths.append((above, found))
    return tuple(lengths)
