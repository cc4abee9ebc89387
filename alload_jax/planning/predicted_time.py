"""Predicted time of a policy's epoch, by which settings are chosen."""

import numpy as np

from alload_jax.planning.cost import CostModel, empty_row_cost, marginal_cost
from alload_jax.planning.epoch import EpochPlan, LeftOver
from alload_jax.planning.policies.first_fit import first_fit_decreasing
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.samples import Samples
from alload_jax.planning.step_costs import micro_batch_costs, rank_costs
from alload_jax.planning.topology import RankTopology

_GIANT = 1.5
"""Cost of a row over that of a mean step from which other ranks wait for it."""


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
    """Predicted time of a policy's first epoch (`epoch_time`).

    Raises:
      InputError: the policy cannot place a sample.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0])))
    epoch = policy.plan_epoch(samples, topology, rng, LeftOver())
    return epoch_time(epoch, samples.seq_len, model, seconds_per_split_token)


def epoch_time(
    epoch: EpochPlan, seq_len: np.ndarray, model: CostModel, seconds_per_split_token: float = 0.0
) -> float:
    """Predicted time of an epoch with all its samples, in the cost model's unit.

    Samples that the epoch leaves over count with the rows that they fill, and with the time that
    other ranks will wait for a row that costs much more than a mean step.
    """
    within = makespan(epoch, seq_len, model, seconds_per_split_token)
    return within + _left_over_time(epoch, seq_len, model, within / max(1, epoch.steps))


def makespan(
    epoch: EpochPlan, seq_len: np.ndarray, model: CostModel, seconds_per_split_token: float = 0.0
) -> float:
    """Sum over an epoch's steps of the predicted time of their slowest ranks."""
    cost = rank_costs(epoch, micro_batch_costs(epoch, seq_len, model, seconds_per_split_token))
    return float(cost.max(axis=1).sum())


def _left_over_time(
    epoch: EpochPlan, seq_len: np.ndarray, model: CostModel, mean_step: float
) -> float:
    """Time of rows that hold the samples left over, shared by the ranks as far as they can be."""
    if not len(epoch.left_over.sample) or epoch.packing is None:
        return 0.0
    shape, left = epoch.packing, seq_len[epoch.left_over.sample]
    footprint = np.sort(np.minimum(shape.footprint(left), shape.capacity))[::-1]
    row, rows = first_fit_decreasing(footprint, shape)
    empty = float(empty_row_cost(model, np.asarray(shape.capacity), np.asarray(shape.segments)))
    weight = np.sort(marginal_cost(model, left))[::-1]
    cost = empty + np.bincount(row, weights=weight, minlength=rows)
    return float(cost.sum()) / epoch.ranks + _waiting(cost / shape.context, epoch.ranks, mean_step)


def _waiting(cost: np.ndarray, ranks: int, mean_step: float) -> float:
    """Time that ranks wait for rows that cost much more than a mean step.

    Args:
      cost: [B] of rows.
      ranks: that a step has.
      mean_step: time of a mean step, which ranks without such a row compute meanwhile.
    """
    giants = np.sort(cost[cost > _GIANT * mean_step])[::-1]
    steps = (giants[at : at + ranks] for at in range(0, len(giants), ranks))
    return sum(
        float(step[0]) - (float(step.sum()) + (ranks - len(step)) * mean_step) / ranks
        for step in steps
    )
