"""Predicted costs of the micro-batches, ranks and steps of a plan."""

import numpy as np

from alload_jax.planning.cost import (
    CostModel,
    QuadraticCost,
    bucketed_cost,
    empty_row_cost,
    marginal_cost,
)
from alload_jax.planning.epoch import EpochPlan


def micro_batch_costs(
    plan: EpochPlan, seq_len: np.ndarray, model: CostModel, seconds_per_split_token: float = 0.0
) -> np.ndarray:
    """Predicted cost of every micro-batch: [W] float64.

    All tokens and slots of a packed row are computed, so its cost is that of an empty row plus the
    marginal cost of every sample. The marginal cost of a split sample is shared equally by the
    ranks of its group, which exchange heads for tokens.

    Args:
      plan: an epoch.
      seq_len: [N] int64, tokens of every sample of the manifest.
      model: the cost model.
      seconds_per_split_token: cost of communication for each token of a rank that is split.
    """
    if plan.packing is None:
        return bucketed_cost(model, plan.rows, plan.padded_len)
    marginal = marginal_cost(model, seq_len[plan.sample])
    owner = plan.micro_batch_of_part()
    is_split, context = plan.packing.is_split, plan.packing.context
    share = marginal * plan.packing.tokens / np.maximum(1, seq_len[plan.sample])
    whole = np.bincount(owner, weights=np.where(is_split, 0, marginal), minlength=len(plan.rows))
    split = np.bincount(owner, weights=np.where(is_split, share, 0), minlength=len(plan.rows))
    by_group = split.reshape(-1, context).mean(axis=1).repeat(context)
    row = empty_row_cost(model, plan.padded_len, plan.slots())
    return row + whole + by_group + seconds_per_split_token * plan.packing.split_tokens


SQUARES = QuadraticCost(0.0, 0.0, 1.0)
"""The model by which a sequence costs S²."""


def micro_batch_terms(
    plan: EpochPlan, seq_len: np.ndarray, model: QuadraticCost = SQUARES
) -> np.ndarray:
    """What each micro-batch has of every term of a cost model.

    Args:
      plan: an epoch.
      seq_len: [N] int64, tokens of every sample of the manifest.
      model: the cost model; its coefficients are not read.

    Returns:
      [W, C] float64: micro-batches (1), sequences or slots for them, tokens with padding, and for
      each term of attention the sum over the sequences, such as that of S² (that of a split sample
      is shared equally by the ranks of its group). The product with the model's `coefficients` is
      `micro_batch_costs` without communication.
    """
    units = np.eye(len(model.coefficients))[3:].tolist()
    attention = [micro_batch_costs(plan, seq_len, model.with_coefficients(unit)) for unit in units]
    sequences = plan.rows if plan.packing is None else plan.slots()
    columns = [np.ones(len(plan.rows)), sequences, plan.rows * plan.padded_len, *attention]
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def rank_costs(plan: EpochPlan, cost: np.ndarray) -> np.ndarray:
    """Sums of micro-batch costs by step and rank: [W] → [steps, ranks]."""
    place = plan.step * plan.ranks + plan.rank
    total = np.bincount(place, weights=cost, minlength=plan.steps * plan.ranks)
    return total.reshape(plan.steps, plan.ranks)


def largest_indivisible_cost(plan: EpochPlan, seq_len: np.ndarray, model: CostModel) -> np.ndarray:
    """[steps] cost of each step's most expensive sample, alone in a micro-batch.

    Split samples do not count because several ranks share them.
    """
    largest = np.zeros(plan.steps)
    if plan.packing is None:
        alone = model.fixed_cost + model.sequence_cost(plan.padded_len)
        np.maximum.at(largest, plan.step, alone)
        return largest
    row = empty_row_cost(model, plan.padded_len, plan.slots())
    marginal = np.where(plan.packing.is_split, 0, marginal_cost(model, seq_len[plan.sample]))
    owner = plan.micro_batch_of_part()
    np.maximum.at(largest, plan.step[owner], row[owner] + marginal)
    return largest
