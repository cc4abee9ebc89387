"""What a comparison of plans leaves to explain, in sentences."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alload_jax.planning.cost import empty_row_cost, marginal_cost
from alload_jax.planning.factory import choose_context
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.predicted_time import predicted_time
from alload_jax.planning.study import Case, Study

_GIANT = 1.5
"""Cost of a sample alone, over that of a mean step, from which it holds up the other ranks."""
_SHARE = 0.02
"""Share of an epoch's time that is worth advice."""
_MOST_SAMPLES = 200_000
"""Samples up to which plans are made again to price a bound."""


def advice(study: Study, cases: Sequence[Case]) -> list[str]:
    """Sentences about the cases of one number of ranks.

    They say which plans are the same and why, which sample holds up a plan and what would help, and
    what the bound on a step's samples costs.
    """
    found = []
    for case in cases:
        for tell in (_same_as_equal_tokens, _giant, _price_of_spread):
            if sentence := tell(study, case):
                found.append(sentence)
    return found


def _same_as_equal_tokens(study: Study, case: Case) -> str | None:
    """Where M_comp does not bind, the plan is that of memory alone."""
    policy, m_mem = case.plan.policy, case.plan_m_mem
    if case.config.traits.packed or not case.config.traits.has_m_comp or not m_mem:
        return None
    buckets = study.samples.buckets()
    rows = policy.rows_per_bucket(buckets)  # type: ignore[attr-defined]
    if not np.array_equal(rows, m_mem // buckets.seq_len):
        return None
    return (
        f"{case.name}: M_comp does not bind. Every bucket gets the rows that M_mem allows, so the "
        "plan is that of equal_tokens."
    )


def _giant(study: Study, case: Case) -> str | None:
    """A few samples whose cost exceeds what the other ranks of their steps have to do."""
    policy = case.plan.policy
    if not isinstance(policy, Balanced) or policy.context > 1:
        return None
    lengths, counts = np.unique(study.samples.typical().seq_len, return_counts=True)
    mean = (1 - case.metrics.idle) * case.metrics.cost / case.metrics.steps
    over = _alone(study, case, lengths) / mean
    count = int(counts[over > _GIANT].sum())
    # From as many on as there are ranks, they meet in steps of their own.
    waste = -(-count // case.ranks) * (over.max() - 1) * mean / case.metrics.cost
    if not 0 < count < case.ranks or waste < _SHARE:
        return None
    samples = f"{count} samples of up to {lengths[-1]:,} tokens take"
    if count == 1:
        samples = f"one sample of {lengths[-1]:,} tokens takes"
    found = (
        f"{case.name}: {samples} up to {over.max():.1f} times as long as a mean step, and the "
        "other ranks wait."
    )
    topology = case.plan.topology
    context = choose_context(case.config, study.samples, topology, study.costs)
    if context == 1:
        return found
    return f"{found} --context {context} splits them and has the least predicted time."


def _alone(study: Study, case: Case, seq_len: np.ndarray) -> np.ndarray:
    """The cost of a row of the plan that holds one sample: [N] tokens → [N]."""
    epoch, model = case.epoch, study.predictor
    empty = empty_row_cost(model, epoch.padded_len[:1], epoch.slots()[:1])
    return np.asarray(empty[0] + marginal_cost(model, seq_len))


def _price_of_spread(study: Study, case: Case) -> str | None:
    """What the bound on a step's samples costs in time."""
    policy = case.plan.policy
    if not isinstance(policy, Balanced) or len(study.samples) > _MOST_SAMPLES:
        return None
    if policy.sample_spread in (None, np.inf) or case.metrics.steps < 2:
        return None
    split = case.config.seconds_per_split_token(study.costs)
    bounded, free = (
        predicted_time(each, study.samples, case.plan.topology, study.predictor, split)
        for each in (policy, replace(policy, sample_spread=None))
    )
    return (
        f"{case.name}: steps hold {case.metrics.step_samples_min:.2f} to "
        f"{case.metrics.step_samples_max:.2f} times the mean number of samples. The bound of "
        f"{policy.sample_spread:g} (--sample-spread) costs "
        f"{max(0.0, bounded / free - 1):.1%} of time."
    )
