"""Searches the tokens and slots of packed rows with the least predicted time of an epoch.

The time over T, the tokens of a row, is a saw: with fewer tokens the same steps hold less padding,
until one step more is needed. Lengths that do not add up to T leave padding too. So epochs are
planned at many T, the most promising first, until a lower bound on the time of all others is above
the best. Slots for samples are computed too, and too few of them leave rows of short samples
unfilled.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from alload_jax.planning.cost import CostModel, empty_row_cost, marginal_cost
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.predicted_time import predicted_time
from alload_jax.planning.samples import Samples
from alload_jax.planning.topology import RankTopology

_MOST_SAMPLES, _FEWEST_RANKS = 4_000, 8
"""Samples of the epochs that are tried, and ranks to which those of a larger data set shrink."""
_STEP, _COARSE = 1.01, 8
"""Ratio of neighbours among the T that may be tried; every eighth is tried first."""
TRIALS = 24
"""Epochs that are planned before the search goes on around the best T alone."""
_COMMON_LENGTHS = 6
_SLOT_FACTORS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Slots that are tried, over the mean number of samples of a row."""
_AMPLE = 4.0
"""Slots while tokens are chosen, over that mean."""
_WORTH_OF_SLOTS = 0.003
"""Share of the time that more slots must save."""

RowPolicy = Callable[[int, int], Policy]
"""(tokens, slots) → the policy with such rows."""


@dataclass(frozen=True)
class RowTrials:
    """Plans epochs with rows of several sizes.

    Attributes:
      policy_at: (tokens, slots) → the policy with such rows.
      samples: of the epochs, drawn so that they and the ranks are a model of the whole.
      topology: ranks of the epochs.
      model: the cost model.
      align: samples begin at multiples of this many tokens.
      context: ranks over which a sample may be split.
      seconds_per_split_token: cost of communication for each token of a rank that is split.
    """

    policy_at: RowPolicy
    samples: Samples
    topology: RankTopology
    model: CostModel
    align: int
    context: int
    seconds_per_split_token: float

    @classmethod
    def of(
        cls,
        policy_at: RowPolicy,
        samples: Samples,
        topology: RankTopology,
        model: CostModel,
        align: int,
        context: int,
        seconds_per_split_token: float = 0.0,
    ) -> "RowTrials":
        """Draws few samples from many, for fewer ranks: samples per rank decide on the steps."""
        factor = len(samples) / _MOST_SAMPLES
        if factor > 1:
            least = min(topology.ranks, max(context, _FEWEST_RANKS // context * context))
            ranks = max(least, round(topology.ranks / factor / context) * context)
            count = max(_MOST_SAMPLES, round(len(samples) * ranks / topology.ranks))
            count = min(count, _MOST_SAMPLES * 4, len(samples))
            samples = _spread_draw(samples, count)
            topology = RankTopology(ranks, micro_batches_per_step=topology.micro_batches_per_step)
        split = seconds_per_split_token
        return cls(policy_at, samples, topology, model, align, context, split)

    def time(self, tokens: int, slots: int) -> float:
        """Predicted time of all ranks for a token, with rows of so many tokens and slots."""
        return self.time_of(self.policy_at(tokens, slots))

    def time_of(self, policy: Policy) -> float:
        """Predicted time of all ranks for a token."""
        split = self.seconds_per_split_token
        return self._per_token * predicted_time(
            policy, self.samples, self.topology, self.model, split
        )

    @property
    def _per_token(self) -> float:
        """Time of all ranks for a token, for each unit of time of an epoch."""
        return self.topology.ranks / float(self.samples.seq_len.sum())

    def best_tokens(
        self,
        most: int,
        below: float = np.inf,
        trials: int = TRIALS,
        given: int | None = None,
    ) -> tuple[int, float]:
        """T with the least predicted time, and that `time`.

        Args:
          most: the largest T, which is also the answer if the longest sample does not fit; the
            smallest is the longest sample, or its share where it is split.
          below: a time that is known of other rows; what cannot be faster is not tried.
          trials: epochs that are planned before the search goes on around the best T alone.
          given: the T to take; None searches it.
        """
        footprint = np.sort(-(-self.samples.seq_len // self.align) * self.align)[::-1]
        longest = -(-int(footprint[0]) // (self.context * self.align)) * self.align
        if longest > most:  # the plan refuses it
            return most, np.inf
        values = self._candidates(footprint, longest, most)
        values = values if given is None else np.asarray([given])
        bound = self._lower_bounds(values, footprint)
        times = np.full(len(values), np.inf)

        def try_out(places: Iterable[int], trials: int) -> None:
            for place in sorted(places, key=lambda place: float(bound[place])):
                if trials and np.isinf(times[place]) and bound[place] < min(below, times.min()):
                    slots = slots_for(self.samples, int(values[place]), _AMPLE)
                    times[place] = self.time(int(values[place]), slots)
                    trials -= 1

        try_out({*range(0, len(values), _COARSE), len(values) - 1}, trials)
        try_out(np.argsort(bound, kind="stable")[:trials].tolist(), trials // 2)
        for reach in (_COARSE // 2, 2):
            for best in np.argsort(times, kind="stable")[:2].tolist():
                near = range(max(0, best - reach), min(len(values), best + reach + 1))
                try_out(near, min(2 * reach, trials // 3))
        return int(values[times.argmin()]), float(times.min())

    def best_slots(self, tokens: int) -> int:
        """Slots of rows of so many tokens with the least predicted time.

        The fewest that are as good as the best: each slot takes memory.
        """
        tried = sorted({slots_for(self.samples, tokens, factor) for factor in _SLOT_FACTORS})
        times = [self.time(tokens, slots) for slots in tried]
        enough = [n for n, time in enumerate(times) if time <= (1 + _WORTH_OF_SLOTS) * min(times)]
        return tried[enough[0]]

    def _candidates(self, footprint: np.ndarray, least: int, most: int) -> np.ndarray:
        """[K] int64, ascending: T evenly on a logarithmic scale, and sums of common lengths."""
        count = int(np.ceil(np.log(most / least) / np.log(_STEP))) + 1
        even = np.geomspace(least, most, count)
        lengths, counts = np.unique(footprint, return_counts=True)
        common = lengths[np.argsort(-lengths * counts, kind="stable")[:_COMMON_LENGTHS]]
        sums = {int(most // length * length) for length in common}
        for first in common[common <= most]:
            sums |= {int(first + (most - first) // other * other) for other in common}
        total = int(footprint.sum())
        rows = self.topology.ranks * np.arange(1, 5)
        found = -(-np.r_[even, total / rows, list(sums)].astype(np.int64) // self.align)
        found = np.unique(found * self.align)
        found = found[(found >= least) & (found <= most)]
        return np.unique(np.r_[least, found, most // self.align * self.align or most])

    def _lower_bounds(self, values: np.ndarray, footprint: np.ndarray) -> np.ndarray:
        """[K]: what `time` is at least with rows of these tokens ([K])."""
        ranks, weight = self.topology.ranks, marginal_cost(self.model, footprint)
        steps = np.ceil(footprint.sum() / (ranks * values.astype(np.float64))).astype(np.int64)
        empty = empty_row_cost(self.model, values, np.zeros(len(values)))
        least = weight.sum() / ranks
        if self.context == 1:
            # The costliest samples of all steps: those of one step hide ranks − 1 others.
            upto = np.cumsum(weight[::ranks])
            least = np.maximum(least, upto[np.minimum(steps, len(upto)) - 1])
        return np.asarray(self._per_token * (steps * empty + least))


def slots_for(samples: Samples, tokens: int, factor: float) -> int:
    """So many times the samples of a mean row, rounded up to a multiple of 4; at most what fits."""
    mean = tokens / max(1.0, float(samples.seq_len.mean()))
    fit = max(1, tokens // int(samples.seq_len.min()))
    return min(fit, -(-int(np.ceil(factor * mean)) // 4) * 4)


def _spread_draw(samples: Samples, count: int) -> Samples:
    """So many samples evenly over the lengths, the longest among them."""
    order = np.argsort(samples.seq_len, kind="stable")
    drawn = order[np.linspace(0, len(order) - 1, count).astype(np.int64)]
    return Samples(samples.shape[drawn], samples.seq_len[drawn])
