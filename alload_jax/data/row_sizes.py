"""What is static of packed rows: sizes that hold whatever a plan may put there."""

from dataclasses import dataclass

from alload_jax.models.length_classes import WINDOWS
from alload_jax.planning.plan import Plan

_LEAST_FILLER = 256
"""Filler attends to itself: in as many pieces as attention has windows, that costs next to nothing,
but pieces need be no shorter than this."""
_LONG_CONDITION, _SHORT_CONDITION = 512, 8
"""A row's condition tokens are a multiple of one of these, so that attention can show them to cuDNN
in equal windows: of the first where samples have as many."""


@dataclass(frozen=True)
class RowSizes:
    """Of the rows of one program.

    Attributes:
      tokens: T.
      region: A, the first tokens of each row, which hold parts of split samples.
      context: c, ranks of a group, whose regions make one joint row.
      slots: segments of a row.
      whole_slots: those behind the region.
      joint_slots: segments of a joint row.
      condition: condition tokens of a row.
      longest_whole: most tokens of a segment behind the region, samples or filler.
      longest_part: most tokens of a segment in the region.
      longest_joint: most tokens of a segment of a joint row.
      longest_filler: most tokens of a segment of filler behind the region.
      longest_joint_filler: most tokens of one in a joint row.
    """

    tokens: int
    region: int
    context: int
    slots: int
    whole_slots: int
    joint_slots: int
    condition: int
    longest_whole: int
    longest_part: int
    longest_joint: int
    longest_filler: int
    longest_joint_filler: int

    @property
    def longest(self) -> int:
        """Most tokens of any segment of a row."""
        return max(self.longest_whole, self.longest_part)


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
    tokens, samples = int(epoch.padded_len[0]), packing.segments
    joint = packing.context * region
    filler = _longest_filler(packing.align, tokens - region)
    joint_filler = _longest_filler(packing.align, joint)
    # A gap behind each sample, where they are aligned.
    gaps = 2 if packing.align > 1 else 1
    whole = gaps * samples + _pieces(tokens - region, filler)
    shared = packing.region_segments
    parts = gaps * shared + 1 if region else 0
    real = samples + (shared if region else 0)
    wanted = real * condition + whole + parts - real
    multiple = _LONG_CONDITION if condition >= _LONG_CONDITION else _SHORT_CONDITION
    return RowSizes(
        tokens=tokens,
        region=region,
        context=packing.context,
        slots=whole + parts,
        whole_slots=whole,
        joint_slots=gaps * shared + _pieces(joint, joint_filler),
        condition=-(-wanted // multiple) * multiple,
        longest_whole=max(filler, min(packing.longest_whole, tokens - region)),
        longest_part=max(1, region),
        longest_joint=max(joint_filler, min(int(plan.samples.seq_len.max()), joint)),
        longest_filler=filler,
        longest_joint_filler=joint_filler,
    )


def _longest_filler(align: int, tokens: int) -> int:
    """Most tokens of a piece of filler among so many; behind an aligned sample it is one piece."""
    return max(1, min(tokens, max(align, _LEAST_FILLER, -(-tokens // WINDOWS))))


def _pieces(tokens: int, longest: int) -> int:
    """Segments of filler where nothing lies."""
    return -(-tokens // longest)
