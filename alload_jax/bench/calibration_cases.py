"""The micro-batches that a calibration measures; no JAX."""

from dataclasses import dataclass

_TARGETS = (4_096, 16_384, 65_536)
"""Tokens of the micro-batches of several rows."""
_MOST_SIDE = 64


@dataclass(frozen=True)
class Case:
    """A micro-batch of the grid."""

    rows: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.seq_len

    def latents(self, patch_size: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """(rows, frames, height, width) whose patches make `seq_len` tokens a row.

        Height and width are the largest divisors of at most 64 patches; frames take the rest.
        Costs depend on the product alone.
        """
        width = _largest_divisor(self.seq_len)
        height = _largest_divisor(self.seq_len // width)
        patches = (self.seq_len // width // height, height, width)
        frames, height, width = (n * p for n, p in zip(patches, patch_size, strict=True))
        return (self.rows, frames, height, width)


def grid(shortest: int, longest: int, m_mem: int) -> list[Case]:
    """Lengths doubling up to the longest, one row and several rows of each; fewest tokens first."""
    lengths = [shortest * 2**n for n in range(64) if shortest * 2**n < longest] + [longest]
    cases = {Case(1, s) for s in lengths}
    cases |= {Case(t // s, s) for s in lengths for t in _TARGETS if t >= 2 * s}
    return sorted((c for c in cases if c.tokens <= m_mem), key=lambda c: (c.tokens, c.seq_len))


def _largest_divisor(number: int) -> int:
    return next(d for d in range(min(number, _MOST_SIDE), 0, -1) if number % d == 0)
