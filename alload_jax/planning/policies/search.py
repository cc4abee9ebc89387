"""Searches M_comp and the tokens of packed rows by the predicted time of an epoch.

The time over T, the tokens of a row, is a saw: with fewer tokens the same steps hold less padding,
until one step more is needed. Lengths that do not add up to T leave padding too. So epochs are
planned at many T, the most promising first, until a lower bound on the time of all others is above
the best. Slots for samples are computed too, and too few of them leave rows of short samples
unfilled.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.cost import (
    CostModel,
    empty_row_cost,
    marginal_cost,
    micro_batch_costs,
    rank_costs,
)
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.policies.packed import slots_for
from alload_jax.planning.policies.policy import Policy, RankTopology
from alload_jax.planning.samples import Samples


def draw_samples(samples: Samples, most: int) -> Samples:
    """At most so many samples, among them the longest; they depend on the data set alone."""
    if len(samples) <= most:
        return samples
    drawn = np.random.default_rng(0).choice(len(samples), most, replace=False)
    drawn = np.union1d(drawn, np.argmax(samples.seq_len))
    return Samples(samples.shape[drawn], samples.seq_len[drawn])


def predicted_time(
    policy: Policy,
    samples: Samples,
    topology: RankTopology,
    model: CostModel,
    seconds_per_split_token: float = 0.0,
) -> float:
    """Predicted time of a policy's first epoch, in the cost model's unit.

    Raises:
      InputError: the policy cannot place a sample.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0])))
    epoch = policy.plan_epoch(samples, topology, rng)
    return makespan(epoch, samples.seq_len, model, seconds_per_split_token)


def makespan(
    epoch: EpochPlan, seq_len: np.ndarray, model: CostModel, seconds_per_split_token: float = 0.0
) -> float:
    """Sum over an epoch's steps of the predicted time of their slowest ranks."""
    cost = rank_costs(epoch, micro_batch_costs(epoch, seq_len, model, seconds_per_split_token))
    return float(cost.max(axis=1).sum())


_POINTS, _FINE_POINTS = 17, 10
"""Values of M_comp to try over the whole range, then between the neighbours of the best."""
_MOST_SAMPLES, _MOST_PER_RANK = 20_000, 200
"""Maximum samples to plan per value, in all or per rank, whichever is more."""


@dataclass(frozen=True)
class MCompCurve:
    """Predicted time of an epoch over M_comp.

    Attributes:
      m_comp: [K] float64, ascending, in the policy's measure.
      cost: [K] float64, predicted time of an epoch, in the cost model's unit.
      chosen: the value with the least cost; of several the largest, which needs the fewest steps.
    """

    m_comp: np.ndarray
    cost: np.ndarray

    @property
    def chosen(self) -> float:
        """See the class."""
        return float(self.m_comp[np.flatnonzero(self.cost == self.cost.min())[-1]])


def longest_alone(policy: Policy, samples: Samples) -> float:
    """The M_comp called `longest`: the most costly sample at B = 1, in the policy's measure.

    That is the longest, unless sparse attention makes it cheaper than a shorter one. AdaptiveLoad
    (arXiv 2605.17923) does not say how it chooses M_comp.

    Raises:
      InputError: the policy has no M_comp.
    """
    return float(policy.m_comp_measure(np.unique(samples.seq_len)).max())


def search_m_comp(
    policy_at: Callable[[float], Policy],
    samples: Samples,
    topology: RankTopology,
    model: CostModel,
    seconds_per_split_token: float = 0.0,
) -> MCompCurve:
    """Plans an epoch at values of M_comp over the policy's range (`Policy.m_comp_range`).

    Args:
      policy_at: the policy with a given M_comp.
      samples: the samples of the data set.
      topology: ranks and steps.
      model: the cost model.
      seconds_per_split_token: cost of communication for each token of a rank that is split.

    Raises:
      InputError: the policy has no M_comp or cannot place a sample.
    """
    least, most = policy_at(1.0).m_comp_range(np.unique(samples.seq_len))
    if not least > 0:
        raise InputError("the cost model predicts a cost of 0 for samples; calibrate it again")
    drawn = draw_samples(samples, max(_MOST_SAMPLES, _MOST_PER_RANK * topology.ranks))

    def curve(values: np.ndarray) -> MCompCurve:
        plans = (policy_at(float(value)) for value in values)
        cost = [
            predicted_time(plan, drawn, topology, model, seconds_per_split_token) for plan in plans
        ]
        return MCompCurve(values, np.asarray(cost) * len(samples) / len(drawn))

    coarse = curve(np.unique(np.geomspace(least, most, _POINTS)))
    best = int(np.searchsorted(coarse.m_comp, coarse.chosen))
    below, above = coarse.m_comp[max(0, best - 1)], coarse.m_comp[best + 1 :][:1]
    around = np.geomspace(below, float(above[0]) if len(above) else most, _FINE_POINTS + 2)
    inner = np.setdiff1d(around[1:-1], coarse.m_comp)
    fine = curve(inner)
    order = np.argsort(np.r_[coarse.m_comp, fine.m_comp])
    return MCompCurve(
        np.r_[coarse.m_comp, fine.m_comp][order], np.r_[coarse.cost, fine.cost][order]
    )


_MOST_SEARCHED, _FEWEST_RANKS = 4_000, 8
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


class RowTrials:
    """Plans epochs with rows of several sizes.

    Of many samples it draws few, for fewer ranks: samples per rank decide on the steps.

    Attributes:
      samples: of the epochs.
      topology: ranks of the epochs.
    """

    def __init__(
        self,
        policy_at: RowPolicy,
        samples: Samples,
        topology: RankTopology,
        model: CostModel,
        align: int,
        context: int,
        seconds_per_split_token: float = 0.0,
    ):
        """Draws the samples of the epochs.

        Args:
          policy_at: (tokens, slots) → the policy with such rows.
          samples: of a typical epoch.
          topology: ranks and steps.
          model: the cost model.
          align: samples begin at multiples of this many tokens.
          context: ranks over which a sample may be split.
          seconds_per_split_token: cost of communication for each token of a rank that is split.
        """
        factor = len(samples) / _MOST_SEARCHED
        if factor > 1:
            least = min(topology.ranks, max(context, _FEWEST_RANKS // context * context))
            ranks = max(least, round(topology.ranks / factor / context) * context)
            count = max(_MOST_SEARCHED, round(len(samples) * ranks / topology.ranks))
            samples = _spread_draw(samples, min(count, _MOST_SEARCHED * 4, len(samples)))
            topology = RankTopology(ranks, micro_batches_per_step=topology.micro_batches_per_step)
        self.samples, self.topology = samples, topology
        self._policy_at, self._model = policy_at, model
        self._align, self._context = align, context
        self._seconds_per_split_token = seconds_per_split_token

    def time(self, tokens: int, slots: int) -> float:
        """Predicted time of all ranks for a token, with rows of so many tokens and slots."""
        return self.time_of(self._policy_at(tokens, slots))

    def time_of(self, policy: Policy) -> float:
        """Predicted time of all ranks for a token."""
        split = self._seconds_per_split_token
        time = predicted_time(policy, self.samples, self.topology, self._model, split)
        return self._per_token * time

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
        footprint = np.sort(-(-self.samples.seq_len // self._align) * self._align)[::-1]
        longest = -(-int(footprint[0]) // (self._context * self._align)) * self._align
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
        found = -(-np.r_[even, total / rows, list(sums)].astype(np.int64) // self._align)
        found = np.unique(found * self._align)
        found = found[(found >= least) & (found <= most)]
        return np.unique(np.r_[least, found, most // self._align * self._align or most])

    def _lower_bounds(self, values: np.ndarray, footprint: np.ndarray) -> np.ndarray:
        """[K]: what `time` is at least with rows of these tokens ([K])."""
        ranks, weight = self.topology.ranks, marginal_cost(self._model, footprint)
        steps = np.ceil(footprint.sum() / (ranks * values.astype(np.float64))).astype(np.int64)
        empty = empty_row_cost(self._model, values, np.zeros(len(values)))
        least = weight.sum() / ranks
        if self._context == 1:
            # The costliest samples of all steps: those of one step hide ranks − 1 others.
            upto = np.cumsum(weight[::ranks])
            least = np.maximum(least, upto[np.minimum(steps, len(upto)) - 1])
        return np.asarray(self._per_token * (steps * empty + least))


def _spread_draw(samples: Samples, count: int) -> Samples:
    """So many samples evenly over the lengths, the longest among them."""
    order = np.argsort(samples.seq_len, kind="stable")
    drawn = order[np.linspace(0, len(order) - 1, count).astype(np.int64)]
    return Samples(samples.shape[drawn], samples.seq_len[drawn])
