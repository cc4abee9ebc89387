"""Static sizes of packed rows, sufficient for every step of a plan."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alload_jax.models.common.segments import Lengths
from alload_jax.planning.plan import Plan

_LONG_CONDITION, _SHORT_CONDITION = 512, 8
"""The number of condition tokens per row is a multiple of one of these, so that cuDNN can get the
row in equal windows: of the first if samples have at least as many."""
THINNED = 0.75
"""A length starts a new class if the number of longer segments falls below this fraction."""


@dataclass(frozen=True)
class RowSizes:
    """Sizes of the rows of one program.

    Attributes:
      tokens: T, tokens per row.
      split_tokens: A, tokens of the split region at the start of each row.
      context: c, ranks per context group.
      whole: maximum number of samples behind the split region.
      split: maximum number of split samples in a context group, and of their parts in a row.
      condition: condition tokens per row.
      lengths: bounds on the lengths of all segments of a row.
      whole_lengths: bounds on the lengths of the segments behind the split region.
      split_lengths: bounds on the lengths of the split samples of a context group.
      parts: tokens per row of each kind of condition tokens whose number differs by sample.
    """

    tokens: int
    split_tokens: int
    context: int
    whole: int
    split: int
    condition: int
    lengths: Lengths
    whole_lengths: Lengths
    split_lengths: Lengths
    parts: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """Maximum number of segments per row."""
        return self.whole + self.split


def row_sizes(plan: Plan, condition: int, split_tokens: int) -> RowSizes:
    """Returns the sizes of rows whose split region has `split_tokens` tokens.

    Args:
      plan: a packed plan.
      condition: condition tokens per sample.
      split_tokens: A, one of the plan's allowed split sizes.
    """
    epoch = plan.epoch(0)
    packing = epoch.packing
    assert packing is not None
    tokens, whole = int(epoch.padded_len[0]), packing.segments
    split = packing.region_segments if split_tokens else 0
    behind, together = tokens - split_tokens, packing.context * split_tokens
    seq_len = np.unique(plan.samples.seq_len)
    never_split = seq_len[seq_len <= packing.longest_whole]
    whole_range = _Range(behind, never_split, whole)
    parts_range = _Range(split_tokens, seq_len, split, cut=2)
    return RowSizes(
        tokens=tokens,
        split_tokens=split_tokens,
        context=packing.context,
        whole=whole,
        split=split,
        condition=_rounded_up((whole + split) * condition, condition),
        lengths=_lengths(whole_range, parts_range),
        whole_lengths=_lengths(whole_range),
        split_lengths=_lengths(_Range(together, seq_len, split)),
    )


def single_sample_sizes(tokens: int, condition: int) -> RowSizes:
    """The sizes of rows of one sample each, with `condition` condition tokens."""
    lengths = ((0, 1), (tokens, 0))
    return RowSizes(
        tokens=tokens,
        split_tokens=0,
        context=1,
        whole=1,
        split=0,
        condition=_rounded_up(condition, condition),
        lengths=lengths,
        whole_lengths=lengths,
        split_lengths=lengths,
    )


def _rounded_up(tokens: int, of_sample: int) -> int:
    """Condition tokens of a row, of samples that have `of_sample` of them each."""
    multiple = _LONG_CONDITION if of_sample >= _LONG_CONDITION else _SHORT_CONDITION
    return max(1, -(-tokens // multiple)) * multiple


class _Range(NamedTuple):
    """A range of consecutive tokens in which segments lie.

    Attributes:
      tokens: number of tokens of the range.
      seq_len: distinct lengths of the samples that can lie there, in tokens, ascending.
      samples: maximum number of samples.
      cut: number of ends of the range that samples may cross, 0 to 2.
    """

    tokens: int
    seq_len: np.ndarray
    samples: int
    cut: int = 0

    def longer(self, above: int) -> int:
        """Returns the maximum number of segments with more than `above` tokens."""
        longer = self.seq_len[np.searchsorted(self.seq_len, above, side="right") :]
        if not len(longer):
            return 0
        fit = self.tokens // int(longer[0]) + self.cut
        return min(self.samples, fit, self.tokens // (above + 1))


def _lengths(*ranges: _Range) -> Lengths:
    """Returns bounds on the lengths of the segments in these ranges of a row."""
    lengths = [(0, max(1, sum(each.longer(0) for each in ranges)))]
    bounds = np.concatenate(
        [[1, *(each.tokens for each in ranges)], *(each.seq_len for each in ranges)]
    )
    for above in np.unique(bounds[bounds > 0]).tolist():
        if (found := sum(each.longer(above) for each in ranges)) < THINNED * lengths[-1][1]:
            lengths.append((above, found))
    return tuple(lengths)
