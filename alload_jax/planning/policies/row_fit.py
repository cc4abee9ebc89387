"""Chooses the tokens and slots of packed rows by predicted time.

A row of M_mem tokens is not always the fastest: lengths that do not add up to it leave padding,
which is computed. Slots for samples are computed too, and too few of them leave rows of short
samples unfilled.
"""

from collections.abc import Callable

import numpy as np

from alload_jax.planning.cost import CostModel
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.predicted_time import draw_samples, predicted_time
from alload_jax.planning.samples import Samples
from alload_jax.planning.topology import RankTopology

_MOST_SAMPLES, _MOST_RANKS = 10_000, 16
"""Samples and ranks of the epochs that are tried: the best row hardly depends on more."""
_COMMON_LENGTHS = 6
_SHARES = np.linspace(0.6, 0.95, 8)
"""Rows of these shares of M_mem are tried, beside multiples of common lengths."""
_SLOT_FACTORS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Slots that are tried, over the mean number of samples of a row."""
_AMPLE = 4.0
"""Slots while tokens are chosen, over that mean."""
_WORTH, _WORTH_OF_SLOTS = 0.01, 0.003
"""Share of the time that a row of other tokens than M_mem, or of more slots, must save."""

RowPolicy = Callable[[int, int], Policy]
"""(tokens, slots) → the policy with such rows."""


def choose_tokens(
    policy_at: RowPolicy,
    samples: Samples,
    topology: RankTopology,
    model: CostModel,
    most: int,
    align: int,
    context: int,
) -> int:
    """Tokens of a row with the least predicted time.

    Args:
      policy_at: (tokens, slots) → the policy with such rows.
      samples: of the data set.
      topology: ranks.
      model: the cost model.
      most: M_mem; also the answer where no other row is clearly faster.
      align: samples begin at multiples of this many tokens.
      context: ranks over which a sample may be split.
    """
    drawn, few = draw_samples(samples, _MOST_SAMPLES), _fewer_ranks(topology, context)
    footprint = -(-drawn.seq_len // align) * align
    longest = -(-int(footprint.max()) // context)
    if longest > most:  # the plan refuses it
        return most
    least = max(longest, most // 2)
    found = {}
    for tokens in (most, *_token_candidates(footprint, most, align)):
        if tokens >= least:
            slots = slots_for(drawn, tokens, _AMPLE)
            found[tokens] = predicted_time(policy_at(tokens, slots), drawn, few, model)
    best = min(found, key=lambda tokens: found[tokens])
    return best if found[best] < (1 - _WORTH) * found[most] else most


def choose_slots(
    policy_at: RowPolicy,
    samples: Samples,
    topology: RankTopology,
    model: CostModel,
    tokens: int,
    context: int,
) -> int:
    """Slots of a row of so many tokens with the least predicted time; arguments as above."""
    drawn, few = draw_samples(samples, _MOST_SAMPLES), _fewer_ranks(topology, context)
    tried = sorted({slots_for(drawn, tokens, factor) for factor in _SLOT_FACTORS})
    times = [predicted_time(policy_at(tokens, slots), drawn, few, model) for slots in tried]
    # The fewest that are as good as the best: each slot takes memory.
    enough = [n for n, time in enumerate(times) if time <= (1 + _WORTH_OF_SLOTS) * min(times)]
    return tried[enough[0]]


def slots_for(samples: Samples, tokens: int, factor: float) -> int:
    """So many times the samples of a mean row, rounded up to a multiple of 4; at most what fits."""
    mean = tokens / max(1.0, float(samples.seq_len.mean()))
    fit = max(1, tokens // int(samples.seq_len.min()))
    return min(fit, -(-int(np.ceil(factor * mean)) // 4) * 4)


def _token_candidates(footprint: np.ndarray, most: int, align: int) -> list[int]:
    """Shares of M_mem, and sums of common lengths that come close to it, largest first."""
    lengths, counts = np.unique(footprint, return_counts=True)
    common = lengths[np.argsort(-lengths * counts, kind="stable")[:_COMMON_LENGTHS]]
    sums = {int(most // length * length) for length in common}
    for first in common:
        sums |= {int(first + (most - first) // other * other) for other in common if first <= most}
    shares = {int(share * most) // align * align for share in _SHARES}
    return sorted({tokens for tokens in sums | shares if 0 < tokens < most}, reverse=True)


def _fewer_ranks(topology: RankTopology, context: int) -> RankTopology:
    ranks = min(topology.ranks, max(1, _MOST_RANKS // context) * context)
    return RankTopology(ranks, micro_batches_per_step=topology.micro_batches_per_step)
