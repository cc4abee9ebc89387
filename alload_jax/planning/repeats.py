"""How often each sample stands in each epoch of a data set whose sources have weights.

A sample of weight w stands floor(w) or ceil(w) times in an epoch, and in any k epochs in a row
floor(k·w) or ceil(k·w) times. So do n samples alike: together floor(n·w) or ceil(n·w) times, so
that epochs hold about equally many of each length. This is systematic sampling: sample i of n has
the phase (i + u)/n, and stands in epoch e as often as e·w + phase to (e + 1)·w + phase pass whole
numbers; by Hermite's identity Σ floor(x + i/n) = floor(n·x) over the n samples.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.epoch import EpochPlan

LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
"""Bounds of a sample's weight."""
_UNIT = 10**6
"""Weights and phases are whole millionths, so that sums over epochs are exact."""
_EPOCHS = 2**20
"""Epochs of noise: repetition c of epoch e has the noise of epoch e + c·2^20. With at most
`MOST_WEIGHT` repetitions the numbers fit 31 bits."""


@dataclass(frozen=True)
class Repeats:
    """How often each sample stands in each epoch.

    Attributes:
      weight: [N] int64, millionths.
      phase: [N] int64, from 0 to 999,999.
    """

    weight: np.ndarray
    phase: np.ndarray

    @classmethod
    def of(cls, weight: np.ndarray, kind: np.ndarray, seed: int) -> Self:
        """Draws the phases: evenly spaced over samples of one weight and kind, in random order.

        Args:
          weight: [N] float64, expected times that each sample stands in an epoch.
          kind: [N, K] integers, equal for samples that are alike.
          seed: of the order.

        Raises:
          InputError: an epoch might hold no sample.
        """
        units = np.rint(np.asarray(weight) * _UNIT).astype(np.int64)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,))))
        order = np.lexsort((rng.random(len(units)), *kind.T, units))
        ordered = np.column_stack([units, kind])[order]
        first = np.flatnonzero(np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)])
        size = np.diff(np.r_[first, len(order)])
        if not (size * units[order[first]] >= _UNIT).any():
            raise InputError(
                "data.weights: the weights are so small that an epoch might hold no sample; make "
                "all of them larger by one factor"
            )
        within = np.arange(len(order)) - np.repeat(first, size)
        spread = (within + np.repeat(rng.random(len(size)), size)) / np.repeat(size, size)
        phase = np.empty(len(units), np.int64)
        phase[order] = np.minimum((spread * _UNIT).astype(np.int64), _UNIT - 1)
        return cls(units, phase)

    def counts(self, epoch: int) -> np.ndarray:
        """[N] int64: how often each sample stands in an epoch."""
        before = (epoch * self.weight + self.phase) // _UNIT
        return np.asarray(((epoch + 1) * self.weight + self.phase) // _UNIT - before)

    @property
    def is_even(self) -> bool:
        """Whether all epochs hold the same samples: all weights are whole numbers."""
        return not (self.weight % _UNIT).any()


def noise_epoch(epoch: int, repetition: int) -> int:
    """The number that stands for the epoch in the random keys of a sample.

    Args:
      epoch: of the step.
      repetition: which of the sample's times in the epoch this is, from 0.

    Returns:
      The epoch, if the sample is not repeated; a number of its own for each repetition.
    """
    return epoch + repetition * _EPOCHS


def number_repetitions(plan: EpochPlan, seq_len: np.ndarray) -> np.ndarray:
    """Numbers the times that each sample stands in an epoch, from 0 in the order of its steps.

    Args:
      plan: an epoch.
      seq_len: [N] int64, tokens of every sample of the manifest.

    Returns:
      [P] int64; the parts of a split sample have the same number.
    """
    work, tokens = plan.micro_batch_of_part(), plan.part_tokens(seq_len)
    order = np.lexsort((plan.part_offsets(), work, plan.sample))
    sample = plan.sample[order]
    # In this order the parts of one time lie side by side, and their tokens sum to the sample's.
    opens = np.r_[True, sample[1:] != sample[:-1]]
    before = np.cumsum(tokens[order]) - tokens[order]
    found = np.empty_like(order)
    found[order] = (before - np.maximum.accumulate(np.where(opens, before, 0))) // seq_len[sample]
    return found


def times_placed(plan: EpochPlan, seq_len: np.ndarray) -> np.ndarray:
    """[N] float64: how often an epoch holds each sample; parts of split ones count in part."""
    tokens = plan.part_tokens(seq_len).astype(np.float64)
    return np.bincount(plan.sample, weights=tokens, minlength=len(seq_len)) / seq_len


def require_counts(plan: EpochPlan, seq_len: np.ndarray, counts: np.ndarray, policy: str) -> None:
    """Checks that an epoch places each sample as often as it should.

    Raises:
      InputError: the policy is one that places every sample once.
    """
    if not np.array_equal(times_placed(plan, seq_len), counts):
        raise InputError(
            f"planning.policy {policy} places every sample once and cannot follow data.weights; "
            "choose another policy, or leave data.weights out"
        )
