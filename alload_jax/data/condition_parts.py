"""Arrays of condition tokens whose number differs by sample, in bucketed and in packed rows."""

from collections.abc import Mapping, Sequence

import numpy as np

from alload_jax.data.condition import Conditions
from alload_jax.models.common.condition_tokens import ConditionTokens
from alload_jax.models.common.segments import PADDING, Segments

Parts = dict[str, ConditionTokens]
"""Condition tokens by the names of the kinds."""


def bucketed_parts(conditions: Conditions, rows: int) -> Parts:
    """Arrays for rows of one sample each, without any tokens yet."""
    offset = np.zeros((rows, 1), np.int32)
    return {
        part.name: _without_tokens(conditions, part.width, part.length, offset)
        for part in conditions.parts
    }


def packed_parts(
    conditions: Conditions, room: Sequence[int], slots: int, reserved: Sequence[np.ndarray]
) -> Parts:
    """Arrays for packed rows, without any tokens yet.

    Args:
      conditions: the kinds.
      room: tokens of each kind in a row.
      slots: M.
      reserved: for each row [samples, K], most tokens of each sample of each kind.
    """
    offsets = np.zeros((len(conditions.parts), len(reserved), slots), np.int32)
    for row, tokens in enumerate(reserved):
        offsets[:, row, : len(tokens)] = (np.cumsum(tokens, axis=0) - tokens).T
    return {
        part.name: _without_tokens(conditions, part.width, size, offset)
        for part, size, offset in zip(conditions.parts, room, offsets, strict=True)
    }


def put_parts(parts: Parts, row: int, slot: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a sample's tokens, [L, width] by name, to its slot of a row."""
    for name, array in arrays.items():
        values, segments = parts[name]
        begin = int(segments.offset[row, slot])
        here = slice(begin, begin + len(array))
        values[row, here] = array
        segments.ids[row, here] = slot
        segments.length[row, slot] = len(array)


def part_room(
    part_tokens: np.ndarray, seq_len: np.ndarray, row: int, slots: int, split: bool
) -> list[int]:
    """Most tokens of each kind in a row, of samples whose lengths include them.

    Args:
      part_tokens: [N, K] tokens of each sample of each kind.
      seq_len: [N] tokens of each sample in a row, all kinds and those of the latents.
      row: tokens of a row.
      slots: most samples of a row.
      split: whether rows hold parts of samples, each with the whole condition.

    Returns:
      multiples of 8, or of 512 where a sample may have as many, so that attention's kernel gets
      whole windows; at least 8.
    """
    longest = part_tokens.max(axis=0)
    # No row has a larger share of a kind than the sample with the largest.
    by_share = (part_tokens * row // seq_len[:, None]).max(axis=0)
    # Of the parts of a row only its first and its last can be cut.
    cut = 2 if split else 0
    most = np.minimum(slots * longest, by_share + cut * longest)
    multiple = np.where(longest >= 512, 512, 8)
    return (np.maximum(1, -(-most // multiple)) * multiple).tolist()


def _without_tokens(
    conditions: Conditions, width: int, tokens: int, offset: np.ndarray
) -> ConditionTokens:
    """[R, tokens, width] without samples; offset: [R, M]."""
    rows = len(offset)
    ids = np.full((rows, tokens), PADDING, np.int32)
    values = np.zeros((rows, tokens, width), conditions.dtype)
    return ConditionTokens(values, Segments(offset, np.zeros_like(offset), ids))
