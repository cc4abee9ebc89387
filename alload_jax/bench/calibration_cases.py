"""The micro-batches that a calibration measures. This module does not import JAX."""

import math
from dataclasses import dataclass

_TARGETS = (4_096, 16_384, 65_536)
"""Approximate tokens of the micro-batches with several rows."""
_MAX_SIDE = 64


@dataclass(frozen=True)
class Case:
    """A micro-batch of the grid: `rows` sequences of `seq_len` tokens.

    Attributes:
      rows: number of sequences.
      seq_len: tokens of each, as plans count them.
      beside: how many of them are the condition's, in models with joint attention.
    """

    rows: int
    seq_len: int
    beside: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.seq_len

    def latents(self, patch_size: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """Latents (rows, frames, height, width) that make `seq_len` tokens per row.

        Width and height, in patches, are the largest divisors up to 64; the rest are frames. The
        cost depends only on the product.
        """
        tokens = self.seq_len - self.beside
        width = _largest_divisor(tokens)
        height = _largest_divisor(tokens // width)
        patches = (tokens // width // height, height, width)
        frames, height, width = (n * p for n, p in zip(patches, patch_size, strict=True))
        return (self.rows, frames, height, width)


def grid(shortest: int, longest: int, m_mem: int, beside: int = 0) -> list[Case]:
    """Cases with one and several rows of each length, by increasing tokens; lengths double.

    Lengths are those of latents; `beside` tokens of the condition come on top.
    """
    latents = [shortest * 2**n for n in range(64) if shortest * 2**n < longest] + [longest]
    lengths = [tokens + beside for tokens in latents]
    cases = {Case(1, s, beside) for s in lengths}
    cases |= {Case(t // s, s, beside) for s in lengths for t in _TARGETS if t >= 2 * s}
    return sorted((c for c in cases if c.tokens <= m_mem), key=lambda c: (c.tokens, c.seq_len))


def sparse_cases(shortest: int, longest: int, min_tokens: int) -> list[Case]:
    """Up to three lengths from `min_tokens` on, multiples of `shortest`, by increasing tokens.

    They measure layers with sparse attention, which shorter sequences do not use.
    """
    least = max(1, -(-min_tokens // shortest)) * shortest
    if least > longest:
        return []
    middle = round(math.sqrt(least * longest) / shortest) * shortest
    return [Case(1, seq_len) for seq_len in sorted({least, middle, longest})]


def _largest_divisor(number: int) -> int:
    return next(d for d in range(min(number, _MAX_SIDE), 0, -1) if number % d == 0)
