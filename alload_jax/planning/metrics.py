"""How good a plan or a run is: every metric, defined once.

Costs over ranks come as [steps, ranks] arrays; a rank without work costs 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alload_jax.planning.cost import CostModel, bucketed_cost
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.plan import Plan, Step


def imbalance(cost: np.ndarray) -> np.ndarray:
    """max/mean − 1 over ranks: [..., ranks] → [...]; 0 is perfect."""
    return _ratio(cost.max(axis=-1), cost.mean(axis=-1)) - 1


def idle_fraction(cost: np.ndarray) -> np.ndarray:
    """1 − mean/max over ranks: [..., ranks] → [...]; the share of time that ranks wait."""
    return 1 - _ratio(cost.mean(axis=-1), cost.max(axis=-1))


def coefficient_of_variation(values: np.ndarray) -> np.ndarray:
    """Standard deviation over mean: [..., n] → [...]."""
    mean = values.mean(axis=-1)
    return _ratio(values.std(axis=-1), mean, when_zero=0.0)


def padding_ratio(real_tokens: float, computed_tokens: float) -> float:
    """Share of the computed tokens that belong to no sample."""
    return 1 - real_tokens / computed_tokens


def excess_over_bound(cost: np.ndarray, largest_piece: np.ndarray) -> np.ndarray:
    """Makespan over its lower bound, minus 1.

    Args:
      cost: [..., ranks].
      largest_piece: [...], cost of the largest sample, which one rank must run whole.

    Returns:
      [...]; 0 where no placement could be faster.
    """
    bound = np.maximum(cost.mean(axis=-1), largest_piece)
    return _ratio(cost.max(axis=-1), bound) - 1


@dataclass(frozen=True)
class PlanMetrics:
    """An epoch's metrics; means over steps unless said otherwise.

    Attributes:
      steps: optimizer steps of the epoch.
      samples: samples placed.
      tokens: tokens of these samples.
      buckets: distinct (rows, shape) of micro-batches: programs to compile.
      imbalance, imbalance_max: max/mean − 1 of cost over ranks; its mean and its largest.
      idle: 1 − Σmean/Σmax of cost over ranks: the share of rank time spent waiting.
      cost_cv: variation (std/mean) of cost over ranks.
      compute_cv: variation of B·S² over ranks (AdaptiveLoad's compute CV).
      step_cv: variation of the steps' makespan over the epoch.
      padding: computed tokens that belong to no sample, over all computed tokens.
      utilisation: real tokens over M_mem of every micro-batch; None without M_mem.
      excess: makespan over its lower bound, minus 1.
      cost: summed makespan of the epoch.
      dropped, duplicated: samples never placed, placements beyond the first; both must be 0.
    """

    steps: int
    samples: int
    tokens: int
    buckets: int
    imbalance: float
    imbalance_max: float
    idle: float
    cost_cv: float
    compute_cv: float
    step_cv: float
    padding: float
    utilisation: float | None
    excess: float
    cost: float
    dropped: int
    duplicated: int


def plan_metrics(
    plan: EpochPlan, seq_len: np.ndarray, cost_model: CostModel, m_mem: int | None
) -> PlanMetrics:
    """Measures an epoch.

    Args:
      plan: the epoch.
      seq_len: [N] int64, tokens of every sample of the manifest.
      cost_model: predicts what a micro-batch costs.
      m_mem: tokens that a micro-batch may hold.
    """
    cost = rank_costs(plan, bucketed_cost(cost_model, plan.rows, plan.padded_len))
    squares = rank_costs(plan, plan.rows * plan.padded_len.astype(np.float64) ** 2)
    makespan = cost.max(axis=-1)
    computed = int((plan.rows * plan.padded_len).sum())
    tokens = int(seq_len[plan.sample].sum())
    placed = np.bincount(plan.sample, minlength=len(seq_len))
    shapes = np.column_stack([plan.rows, plan.padded_len, plan.shape])
    return PlanMetrics(
        steps=plan.steps,
        samples=len(plan.sample),
        tokens=tokens,
        buckets=len(np.unique(shapes, axis=0)),
        imbalance=float(imbalance(cost).mean()),
        imbalance_max=float(imbalance(cost).max()),
        idle=float(1 - _ratio(cost.mean(axis=-1).sum(), makespan.sum())),
        cost_cv=float(coefficient_of_variation(cost).mean()),
        compute_cv=float(coefficient_of_variation(squares).mean()),
        step_cv=float(coefficient_of_variation(makespan)),
        padding=padding_ratio(tokens, computed),
        utilisation=tokens / (m_mem * len(plan.rows)) if m_mem else None,
        excess=float(excess_over_bound(cost, _largest_piece(plan, cost_model)).mean()),
        cost=float(makespan.sum()),
        dropped=int((placed == 0).sum()),
        duplicated=int(np.maximum(placed - 1, 0).sum()),
    )


class StepMetrics(NamedTuple):
    """What is known of a step before it runs.

    Attributes:
      samples: samples placed in it.
      tokens: tokens of these samples.
      predicted_cost: cost of its costliest rank, in the cost model's unit.
      imbalance: max/mean − 1 of cost over ranks.
      padding: computed tokens that belong to no sample, over all computed tokens.
    """

    samples: int
    tokens: int
    predicted_cost: float
    imbalance: float
    padding: float


def step_metrics(step: Step, plan: Plan, cost_model: CostModel) -> StepMetrics:
    """Measures one step of a plan under a cost model."""
    cost = np.zeros(plan.layout.ranks)
    for part in step.micro_batches:
        cost[part.rank] += bucketed_cost(
            cost_model, np.asarray(part.rows), np.asarray(part.seq_len)
        )
    placed = [sample for part in step.micro_batches for sample in part.samples]
    tokens = int(plan.samples.seq_len[placed].sum())
    computed = sum(part.rows * part.seq_len for part in step.micro_batches)
    return StepMetrics(
        samples=len(placed),
        tokens=tokens,
        predicted_cost=float(cost.max()),
        imbalance=float(imbalance(cost)),
        padding=padding_ratio(tokens, computed),
    )


def rank_costs(plan: EpochPlan, cost: np.ndarray) -> np.ndarray:
    """Sums micro-batch costs by step and rank: [W] → [steps, ranks]."""
    place = plan.step * plan.ranks + plan.rank
    total = np.bincount(place, weights=cost, minlength=plan.steps * plan.ranks)
    return total.reshape(plan.steps, plan.ranks)


def _largest_piece(plan: EpochPlan, cost_model: CostModel) -> np.ndarray:
    """[steps]: cost of each step's costliest single sample, alone in a micro-batch."""
    alone = cost_model.launch + cost_model.of_sequences(plan.padded_len)
    largest = np.zeros(plan.steps)
    np.maximum.at(largest, plan.step, alone)
    return largest


def _ratio(part: np.ndarray, whole: np.ndarray, when_zero: float = 1.0) -> np.ndarray:
    """part/whole, and `when_zero` where whole is 0 (a step without work is balanced)."""
    return np.where(whole == 0, when_zero, part / np.where(whole == 0, 1, whole))
