"""What a comparison of plans leaves to explain, in sentences."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alload_jax.planning.cost import empty_row_cost, marginal_cost
from alload_jax.planning.factory import with_best_context
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.policies.row_search import RowTrials, slots_for
from alload_jax.planning.study import Case, Study

_GIANT = 1.5
"""Cost of a sample alone, over that of a mean step, from which it holds up the other ranks."""
_SHARE = 0.02
"""Share of an epoch's time that is worth advice."""
_OUTSIDE = 1.02
"""Samples of a step over the bound from which that is said."""
_LARGER = np.geomspace(1.02, 2.5, 24)
"""M_mem that are tried to make a bound free, over the present one."""
_SLOTS = 4.0
"""Slots of such rows over the mean number of samples."""


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
    best = with_best_context(case.config, study.samples, topology, study.costs)
    if best.context == 1:
        return found
    return f"{found} --context {best.context} splits them and has the least predicted time."


def _alone(study: Study, case: Case, seq_len: np.ndarray) -> np.ndarray:
    """The cost of a row of the plan that holds one sample: [N] tokens → [N]."""
    epoch, model = case.epoch, study.predictor
    empty = empty_row_cost(model, epoch.padded_len[:1], epoch.slots()[:1])
    return np.asarray(empty[0] + marginal_cost(model, seq_len))


def _price_of_spread(study: Study, case: Case) -> str | None:
    """What the bound on a step's samples costs, where it was relaxed, and what makes it free."""
    policy, wanted = case.plan.policy, case.config.sample_spread
    if not isinstance(policy, Balanced) or wanted in (None, np.inf) or case.metrics.steps < 2:
        return None
    trials = policy.row_trials(study.samples.typical(), case.plan.topology)
    free = trials.time_of(replace(policy, sample_spread=None))
    least, most = case.metrics.step_samples_min, case.metrics.step_samples_max
    found = f"{case.name}: steps hold {least:.2f} to {most:.2f} times the mean number of samples."
    bounded = trials.time_of(replace(policy, sample_spread=wanted)) / free - 1
    if policy.sample_spread == wanted:
        found += f" The bound of {wanted:g} (--sample-spread) costs {max(0.0, bounded):.1%} of time"
        outside = max(1 / least, most) / wanted
        return f"{found}{'; some steps find no way to keep it.' if outside > _OUTSIDE else '.'}"
    taken = "is not kept" if policy.sample_spread is None else f"is {policy.sample_spread:g}"
    found += (
        f" A bound of {wanted:g} (--sample-spread) would cost {bounded:.0%} of time, so it {taken}"
    )
    if m_mem := _free_of_charge(policy, trials, wanted, free):
        found += f"; --m-mem {m_mem} makes it free"
    return found + "."


def _free_of_charge(policy: Balanced, trials: RowTrials, spread: float, time: float) -> int | None:
    """The least M_mem with which the bound on a step's samples takes no more than `time`."""
    for share in _LARGER:
        tokens = int(policy.m_mem * share) // policy.align * policy.align
        slots = slots_for(trials.samples, tokens, _SLOTS)
        larger = replace(policy, m_mem=tokens, row_tokens=tokens, max_segments=slots)
        if trials.time_of(replace(larger, sample_spread=spread)) <= time:
            return tokens
    return None
