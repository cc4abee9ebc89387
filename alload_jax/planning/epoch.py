"""One epoch of a plan, as columns: which rank takes which samples in which micro-batch."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EpochPlan:
    """Every micro-batch of every rank over one epoch, ordered by (step, micro_batch, rank).

    Attributes:
      ranks: data-parallel ranks.
      steps: optimizer steps.
      step, micro_batch, rank: [W] int64, where each micro-batch stands.
      rows: [W] int64, sequences it computes, zero-weight filler rows included.
      padded_len: [W] int64, tokens of each of its rows.
      shape: [W, 3] int64, (frames, height, width) of its rows; zeros where unknown.
      offsets: [W + 1] int64; micro-batch w holds `sample[offsets[w]:offsets[w + 1]]`.
      sample: [N] int64, the manifest's row numbers; each stands here once.
    """

    ranks: int
    steps: int
    step: np.ndarray
    micro_batch: np.ndarray
    rank: np.ndarray
    rows: np.ndarray
    padded_len: np.ndarray
    shape: np.ndarray
    offsets: np.ndarray
    sample: np.ndarray

    def of_step(self, step: int) -> slice:
        """The micro-batches of one step, as a slice of the columns [W]."""
        start, stop = np.searchsorted(self.step, [step, step + 1])
        return slice(int(start), int(stop))

    def samples_of(self, micro_batch: int) -> np.ndarray:
        """The samples of the micro-batch at one position of the columns [W]."""
        return self.sample[self.offsets[micro_batch] : self.offsets[micro_batch + 1]]
