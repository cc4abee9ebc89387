"""Predicted time of a policy's epoch, by which settings are chosen."""

import numpy as np

from alload_jax.planning.cost import CostModel
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.samples import Samples
from alload_jax.planning.step_costs import micro_batch_costs, rank_costs
from alload_jax.planning.topology import RankTopology


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
