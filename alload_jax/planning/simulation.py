"""Simulates a plan step by step with a cost model and noise."""

from dataclasses import dataclass

import numpy as np

from alload_jax.planning.cost import CostModel
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.metrics import coefficient_of_variation, imbalance
from alload_jax.planning.step_costs import micro_batch_costs, rank_costs


@dataclass(frozen=True)
class SimulationSettings:
    """Properties of a cluster that cost models do not include.

    Attributes:
      noise: standard deviation of the logarithm of a rank's time for the same work.
      all_reduce: time added to every step after all ranks are done, in the cost model's unit.
      seed: seed of the noise.
    """

    noise: float = 0.0
    all_reduce: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Simulation:
    """Metrics of a simulated epoch.

    Attributes:
      seconds: time of the epoch, in the cost model's unit.
      tokens_per_second, samples_per_second: over all ranks.
      imbalance, imbalance_max: max/mean − 1 of the ranks' busy time; mean and largest over steps.
      idle: share of the ranks' time in which they wait for each other or the all-reduce.
      step_cv: variation of the steps' duration.
    """

    seconds: float
    tokens_per_second: float
    samples_per_second: float
    imbalance: float
    imbalance_max: float
    idle: float
    step_cv: float


def simulate(
    plan: EpochPlan,
    seq_len: np.ndarray,
    model: CostModel,
    settings: SimulationSettings,
    seconds_per_split_token: float = 0.0,
) -> Simulation:
    """Simulates an epoch: a step takes the time of its slowest rank plus the all-reduce.

    Args:
      plan: the epoch.
      seq_len: [N] int64, tokens of every sample of the manifest.
      model: predicts what a micro-batch costs.
      settings: noise and the all-reduce.
      seconds_per_split_token: cost of communication for each token of a rank that is split.
    """
    busy = rank_costs(plan, micro_batch_costs(plan, seq_len, model, seconds_per_split_token))
    sigma = settings.noise
    if sigma:
        # Log-normal noise of mean 1: the work stays what it was on average.
        normal = np.random.default_rng(settings.seed).standard_normal(busy.shape)
        busy = busy * np.exp(sigma * normal - sigma**2 / 2)
    step = busy.max(axis=1) + settings.all_reduce
    total = float(step.sum())
    tokens = int(plan.part_tokens(seq_len).sum())
    waste = total * plan.ranks - float(busy.sum())
    return Simulation(
        seconds=total,
        tokens_per_second=tokens / total if total else 0.0,
        samples_per_second=len(np.unique(plan.sample)) / total if total else 0.0,
        imbalance=float(imbalance(busy).mean()),
        imbalance_max=float(imbalance(busy).max()),
        idle=waste / (total * plan.ranks) if total else 0.0,
        step_cv=float(coefficient_of_variation(step)),
    )
