"""What a cost model says of every micro-batch, rank and step of a plan."""

import numpy as np

from alload_jax.planning.cost import CostModel, beyond_filler, bucketed_cost
from alload_jax.planning.epoch import EpochPlan


def micro_batch_costs(
    plan: EpochPlan, seq_len: np.ndarray, model: CostModel, anchor_seconds: float = 0.0
) -> np.ndarray:
    """Predicted cost of every micro-batch: [W] float64.

    A packed row is computed whole, so it costs its tokens as filler and, for every sample, what
    that costs beyond filler of its length. An anchor's share of that is equal on all ranks of its
    group, which exchange heads for tokens.

    Args:
      plan: an epoch.
      seq_len: [N] int64, tokens of every sample of the manifest.
      model: the cost model.
      anchor_seconds: cost of communication for each token of a rank that is split.
    """
    if plan.packing is None:
        return bucketed_cost(model, plan.rows, plan.padded_len)
    beyond = beyond_filler(model, seq_len[plan.sample])
    owner, anchor, context = plan.micro_batch_of_part(), plan.packing.anchor, plan.packing.context
    share = beyond * plan.packing.tokens / np.maximum(1, seq_len[plan.sample])
    whole = np.bincount(owner, weights=np.where(anchor, 0, beyond), minlength=len(plan.rows))
    split = np.bincount(owner, weights=np.where(anchor, share, 0), minlength=len(plan.rows))
    by_group = split.reshape(-1, context).mean(axis=1).repeat(context)
    row = model.launch + model.of_filler(plan.rows * plan.padded_len)
    return row + whole + by_group + anchor_seconds * plan.packing.anchor_tokens


def rank_costs(plan: EpochPlan, cost: np.ndarray) -> np.ndarray:
    """Sums micro-batch costs by step and rank: [W] → [steps, ranks]."""
    place = plan.step * plan.ranks + plan.rank
    total = np.bincount(place, weights=cost, minlength=plan.steps * plan.ranks)
    return total.reshape(plan.steps, plan.ranks)


def largest_piece(plan: EpochPlan, seq_len: np.ndarray, model: CostModel) -> np.ndarray:
    """[steps]: cost of each step's costliest single sample, alone in a micro-batch.

    Samples that are split are no single pieces.
    """
    largest = np.zeros(plan.steps)
    if plan.packing is None:
        alone = model.launch + model.of_sequences(plan.padded_len)
        np.maximum.at(largest, plan.step, alone)
        return largest
    row = model.launch + model.of_filler(plan.padded_len)
    beyond = np.where(plan.packing.anchor, 0, beyond_filler(model, seq_len[plan.sample]))
    owner = plan.micro_batch_of_part()
    np.maximum.at(largest, plan.step[owner], row[owner] + beyond)
    return largest
