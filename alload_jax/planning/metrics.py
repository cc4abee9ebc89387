"""The metrics of plans and runs, and of simulated steps.

Costs are [steps, ranks] arrays; the cost of a rank without work is 0.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alload_jax.planning.cost import (
    SQUARES,
    CostModel,
    QuadraticCost,
    computed_costs,
    largest_indivisible_cost,
    micro_batch_costs,
    micro_batch_terms,
    rank_costs,
)
from alload_jax.planning.epoch import EpochPlan, Step, times_placed
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.packed import correlation


def imbalance(cost: np.ndarray) -> np.ndarray:
    """max/mean − 1 over ranks: [..., ranks] → [...]; 0 if all ranks are equal."""
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


@dataclass(frozen=True)
class PlanMetrics:
    """An epoch's metrics; means over steps unless said otherwise.

    Attributes:
      steps: optimizer steps of the epoch.
      samples: samples placed.
      tokens: tokens of these samples.
      buckets: distinct (rows, shape, A) of micro-batches: programs to compile.
      segments: most samples of a micro-batch on one rank.
      step_samples_min, step_samples_max: least and most samples of a step, over their mean.
      imbalance, imbalance_max: max/mean − 1 of cost over ranks; its mean and its largest.
      idle: 1 − Σmean/Σmax of cost over ranks: the share of rank time spent waiting.
      cost_cv: variation (std/mean) of cost over ranks.
      compute_cv: variation of B·S² over ranks (AdaptiveLoad's compute CV).
      step_cv: variation of the steps' makespan over the epoch.
      padding: computed tokens that belong to no sample, over all computed tokens.
      utilisation: real tokens over M_mem of every micro-batch; None without M_mem.
      excess, excess_max: makespan over its lower bound, minus 1; its mean and its largest.
      order_correlation: correlation of a step's index with the mean length of its samples.
      length_share: distinct lengths of a step's samples, over those of the data set.
      longest_weight, longest_weight_by_step: weight of the longest tenth of the samples over that
        of the shortest tenth, where gradients are divided by the plan's mean number of samples of a
        step, and where they are divided by each step's own.
      cost: summed makespan of the epoch.
      tokens_per_second: tokens of the epoch's samples over its cost; per unit where cost has no
        unit.
      dropped, duplicated: samples placed less often than they stand in the epoch (once without
        `data.weights`), and placements beyond that; both must be 0.
    """

    steps: int
    samples: int
    tokens: int
    buckets: int
    segments: int
    step_samples_min: float
    step_samples_max: float
    imbalance: float
    imbalance_max: float
    idle: float
    cost_cv: float
    compute_cv: float
    step_cv: float
    padding: float
    utilisation: float | None
    excess: float
    excess_max: float
    order_correlation: float
    length_share: float
    longest_weight: float
    longest_weight_by_step: float
    cost: float
    tokens_per_second: float
    dropped: int
    duplicated: int


def plan_metrics(plan: EpochPlan, cost_model: CostModel, m_mem: int | None) -> PlanMetrics:
    """Measures an epoch.

    Args:
      plan: the epoch.
      cost_model: the cost model.
      m_mem: maximum tokens of a micro-batch.
    """
    cost = rank_costs(plan, micro_batch_costs(plan, cost_model))
    squares = rank_costs(plan, computed_costs(plan, SQUARES))
    makespan = cost.max(axis=-1)
    # One rank must run the largest sample whole.
    bound = np.maximum(cost.mean(axis=-1), largest_indivisible_cost(plan, cost_model))
    excess = _ratio(makespan, bound) - 1
    computed = int((plan.rows * plan.padded_len).sum())
    tokens = int(plan.part_tokens().sum())
    placed = times_placed(plan)
    wanted = np.ones(len(plan.seq_len), np.int64) if plan.counts is None else plan.counts
    per_step, total = plan.samples_per_step(), float(makespan.sum())
    step, length = plan.step[plan.micro_batch_of_part()], plan.seq_len[plan.sample]
    lengths, kind = np.unique(length, return_inverse=True)
    count = np.bincount(step, minlength=plan.steps)
    total_length = np.bincount(step, weights=length, minlength=plan.steps)
    mean_length = _ratio(total_length, count, when_zero=0.0)
    return PlanMetrics(
        steps=plan.steps,
        samples=round(per_step.sum()),
        step_samples_min=float(per_step.min() / per_step.mean()),
        step_samples_max=float(per_step.max() / per_step.mean()),
        tokens=tokens,
        buckets=programs_of(plan),
        segments=int(np.diff(plan.offsets).max()),
        imbalance=float(imbalance(cost).mean()),
        imbalance_max=float(imbalance(cost).max()),
        idle=float(1 - _ratio(cost.mean(axis=-1).sum(), makespan.sum())),
        cost_cv=float(coefficient_of_variation(cost).mean()),
        compute_cv=float(coefficient_of_variation(squares).mean()),
        step_cv=float(coefficient_of_variation(makespan)),
        padding=padding_ratio(tokens, computed),
        utilisation=tokens / (m_mem * len(plan.rows)) if m_mem else None,
        excess=float(excess.mean()),
        excess_max=float(excess.max()),
        order_correlation=correlation(np.arange(plan.steps), mean_length),
        length_share=len(np.unique(step * len(lengths) + kind)) / plan.steps / len(lengths),
        longest_weight=weight_of_longest(plan, by_step=False),
        longest_weight_by_step=weight_of_longest(plan, by_step=True),
        cost=total,
        tokens_per_second=tokens / total if total else 0.0,
        dropped=int((placed < wanted).sum()),
        duplicated=int((np.floor(placed) - wanted).clip(0).sum()),
    )


def weight_of_longest(plan: EpochPlan, by_step: bool) -> float:
    """Weight of the longest tenth of the samples in an epoch, over that of the shortest tenth.

    Samples of equal length have their mean weight. NaN where the shortest have none.

    Args:
      plan: the epoch.
      by_step: whether the gradient of each step is divided by its own number of samples; else by
        the plan's mean.
    """
    seq_len = plan.seq_len
    share = plan.part_tokens() / seq_len[plan.sample]
    if by_step:
        share = share / plan.samples_per_step()[plan.step[plan.micro_batch_of_part()]]
    weight = np.bincount(plan.sample, weights=share, minlength=len(seq_len))
    if plan.counts is not None:
        weight, seq_len = (column[plan.counts > 0] for column in (weight, seq_len))
        weight = weight / plan.counts[plan.counts > 0]
    _, kind, counts = np.unique(seq_len, return_inverse=True, return_counts=True)
    alike = (np.bincount(kind, weights=weight) / counts)[np.sort(kind)]
    tenth = max(1, len(alike) // 10)
    shortest = float(alike[:tenth].mean())
    return float(alike[-tenth:].mean()) / shortest if shortest else math.nan


class RepeatedNeighbours(NamedTuple):
    """How much of the company of samples in rows returns in the next epoch.

    Attributes:
      share: of a sample's neighbours, those that were its neighbours in the epoch before.
      random: the same if rows of these sizes were filled at random.
    """

    share: float
    random: float


def repeated_neighbours(before: EpochPlan, after: EpochPlan) -> RepeatedNeighbours:
    """Compares the company of samples in two epochs of a plan.

    Neighbours are samples of one micro-batch. Split samples and repetitions are left out.
    """
    first, second = map(_row_of_sample, (before, after))
    both = np.flatnonzero((first >= 0) & (second >= 0))
    pairs = _pairs(second[both])
    if not pairs:
        return RepeatedNeighbours(0.0, 0.0)
    # Pairs that share both rows, over pairs that share the later one.
    shared = _pairs(first[both] * (second.max() + 1) + second[both])
    chance = _pairs(first[both]) / (len(both) * (len(both) - 1) / 2)
    return RepeatedNeighbours(shared / pairs, chance)


def _row_of_sample(plan: EpochPlan) -> np.ndarray:
    """[N] int64: the micro-batch of each sample, or −1."""
    row = np.full(len(plan.seq_len), -1, np.int64)
    split = plan.packing.is_split if plan.packing else np.zeros(len(plan.sample), bool)
    own = ~split & (plan.repetitions() == 0)
    row[plan.sample[own]] = plan.micro_batch_of_part()[own]
    return row


def _pairs(row: np.ndarray) -> float:
    """Pairs of samples that have the same row."""
    _, counts = np.unique(row, return_counts=True)
    return float((counts * (counts - 1) / 2).sum())


def programs_of(plan: EpochPlan) -> int:
    """Distinct shapes of micro-batches of an epoch, each of which is a program."""
    split = plan.packing.split_tokens if plan.packing else np.zeros_like(plan.rows)
    shapes = np.column_stack([plan.rows, plan.padded_len, plan.shape, split])
    return len(np.unique(shapes, axis=0))


class StepMetrics(NamedTuple):
    """Metrics of a step that are known before it runs.

    Attributes:
      samples: samples placed in it.
      tokens: tokens of these samples.
      predicted_cost: cost of its slowest rank, in the cost model's unit.
      imbalance: max/mean − 1 of cost over ranks.
      padding: computed tokens that belong to no sample, over all computed tokens.
      cost_terms: micro-batches, sequences, tokens and squares of its slowest rank, and the terms
        of sparse layers if the cost model has them (`step_costs.micro_batch_terms`), over its
        speed as the plan knows it.
    """

    samples: int
    tokens: int
    predicted_cost: float
    imbalance: float
    padding: float
    cost_terms: tuple[float, ...]


def step_metrics(
    step: Step, plan: Plan, cost_model: CostModel, terms_of: QuadraticCost | None = None
) -> StepMetrics:
    """Measures one step of a plan under a cost model.

    Args:
      step: the step.
      plan: its plan.
      cost_model: the cost model.
      terms_of: the model whose `cost_terms` are wanted; None for `cost_model`, if it is quadratic.
    """
    found, within = plan.of_step(step.index)
    part, revision = found.only(within), plan.revision(step.index)
    speed = np.asarray((revision and revision.speed) or (1.0,) * part.ranks)
    [cost] = rank_costs(part, micro_batch_costs(part, cost_model)) / speed
    slowest = part.rank == int(cost.argmax())
    model = terms_of or (cost_model if isinstance(cost_model, QuadraticCost) else SQUARES)
    terms = micro_batch_terms(part, model)[slowest].sum(axis=0) / speed[cost.argmax()]
    tokens = int(part.part_tokens().sum())
    computed = int((part.rows * part.padded_len).sum())
    return StepMetrics(
        samples=round(float(part.samples_per_step().sum())),
        tokens=tokens,
        predicted_cost=float(cost.max()),
        imbalance=float(imbalance(cost)),
        padding=padding_ratio(tokens, computed),
        cost_terms=tuple(terms.tolist()),
    )


def _ratio(part: np.ndarray, whole: np.ndarray, when_zero: float = 1.0) -> np.ndarray:
    """part/whole, and `when_zero` where whole is 0 (a step without work is balanced)."""
    return np.where(whole == 0, when_zero, part / np.where(whole == 0, 1, whole))


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


def simulate(plan: EpochPlan, model: CostModel, settings: SimulationSettings) -> Simulation:
    """Simulates an epoch: a step takes the time of its slowest rank plus the all-reduce.

    Args:
      plan: the epoch.
      model: predicts what a micro-batch costs.
      settings: noise and the all-reduce.
    """
    busy = rank_costs(plan, micro_batch_costs(plan, model))
    sigma = settings.noise
    if sigma:
        # Log-normal noise of mean 1: the work stays what it was on average.
        normal = np.random.default_rng(settings.seed).standard_normal(busy.shape)
        busy = busy * np.exp(sigma * normal - sigma**2 / 2)
    step = busy.max(axis=1) + settings.all_reduce
    total = float(step.sum())
    tokens = int(plan.part_tokens().sum())
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
