"""The predicted time of a policy's epoch, and the M_comp with the least."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostModel, micro_batch_costs, rank_costs
from alload_jax.planning.epoch import EpochPlan
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
