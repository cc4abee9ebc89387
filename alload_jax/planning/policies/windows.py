"""Places the samples of a window of packed steps again, by measured times, in as many steps.

In a step all ranks wait for the slowest. A rank of speed v should get a row of v times the cost of
the others', and rows hold equally many tokens, so that it gets shorter samples: `by_speed` gives
it cheaper rows of the window, and `_exchange` moves samples between the ranks of a step.
"""

import math
from dataclasses import replace

import numpy as np

from alload_jax.planning.cost import CostModel, marginal_cost, micro_batch_costs, rank_costs
from alload_jax.planning.epoch import EpochPlan, Packing, RowShape, number_repetitions
from alload_jax.planning.policies.packed import PlacedSteps, Stock, packed_epoch
from alload_jax.planning.policies.policy import Policy, RankTopology

_WORTH = 0.001
"""Share of the time that other places must save."""
_ITEMS = 8
"""Samples of two rows that are divided anew at a time, in all ways."""
_MOST_SWEEPS = 256
_EXACT = 1 + 1e-9
_SUBSETS = (np.arange(2**_ITEMS)[:, None] >> np.arange(_ITEMS)) & 1
"""[2^items, items]: all ways to choose some."""


def place_again(
    part: EpochPlan,
    policy: Policy,
    topology: RankTopology,
    cost: CostModel,
    speed: np.ndarray,
    rng: np.random.Generator,
) -> EpochPlan:
    """The window with its samples in other places, where ranks are predicted to wait less.

    Each of its samples keeps its step or moves to another one of the window. Samples that are split
    keep their group.

    Args:
      part: whole steps of a packed plan, numbered from 0.
      policy: its own. No more steps than before are outside its `sample_spread`, and with an M_comp
        rows keep their samples.
      topology: the ranks and micro-batches of a step.
      cost: predicts what a rank of speed 1 takes.
      speed: [ranks] float64 above 0, speed of each rank.
      rng: decides where there is a choice.

    Returns:
      As many steps of the same samples, for the same programs; `part` where none wait less.
    """
    spread = getattr(policy, "sample_spread", None) or np.inf
    keep_rows = getattr(policy, "m_comp", None) is not None
    rows, context = np.arange(len(part.rows)), _packing(part).context
    costs = micro_batch_costs(part, cost).reshape(len(rows) // part.ranks, -1, context).max(axis=2)
    groups = np.arange(costs.size).reshape(costs.shape)  # of ranks that share split samples
    regrouped, split = groups.copy(), _packing(part).split_tokens[:: part.ranks]
    for size in np.unique(split):
        same, of_group = split == size, speed.reshape(-1, context).min(axis=1)
        regrouped[same] = groups[same].ravel()[by_speed(costs[same].ravel(), of_group, rng)]
    most, outside = (1 - _WORTH) * math.fsum(step_times(part, cost, speed)), _outside(part, spread)
    for source in (rows.reshape(-1, context)[regrouped.ravel()].ravel(), rows)[: 2 - keep_rows]:
        found = _moved(part, source, topology, cost, speed, rng, keep_rows)
        if _outside(found, spread) <= outside and math.fsum(step_times(found, cost, speed)) < most:
            return found
    return part


def step_times(part: EpochPlan, cost: CostModel, speed: np.ndarray) -> np.ndarray:
    """[steps] float64: predicted time of the slowest rank of each step; speed is [ranks]."""
    return (rank_costs(part, micro_batch_costs(part, cost)) / speed).max(axis=1)


def by_speed(cost: np.ndarray, speed: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Which row each rank takes in each turn, so that those of a turn take about equally long.

    The costliest row that is left opens a turn, on the fastest rank, and each other rank takes the
    costliest that it computes in that time.

    Args:
      cost: [turns · ranks] float64, of rows.
      speed: [ranks], above 0.
      rng: gives equally fast ranks their rows in random order.

    Returns:
      [turns, ranks] int64, a permutation of the rows.
    """
    order = np.argsort(cost, kind="stable")
    rows = Stock(cost[order].tolist(), [1] * len(cost))
    found = np.empty((len(cost) // len(speed), len(speed)), np.int64)
    cheapest, fastest = 0, float(speed.max())
    for turn in found:
        time = rows.lengths[rows.longest_within(np.inf)] / fastest * _EXACT
        ranks = rng.permutation(len(speed))
        for rank in ranks[np.argsort(-speed[ranks], kind="stable")].tolist():
            row = rows.longest_within(float(speed[rank]) * time)
            if row < 0:
                while not rows.counts[cheapest]:
                    cheapest += 1
                row = cheapest
            rows.take(row, 1)
            turn[rank] = order[row]
    return found


def _packing(part: EpochPlan) -> Packing:
    assert part.packing is not None
    return part.packing


def _outside(part: EpochPlan, spread: float) -> float:
    """Steps with many more or fewer samples than the mean; infinite if a micro-batch has none."""
    if not np.diff(part.offsets).reshape(-1, part.ranks).any(axis=1).all():
        return np.inf
    count = np.bincount(part.step[part.micro_batch_of_part()], minlength=part.steps)
    return float(((count > spread * count.mean()) | (count < count.mean() / spread)).sum())


def _moved(
    part: EpochPlan,
    source: np.ndarray,
    topology: RankTopology,
    cost: CostModel,
    speed: np.ndarray,
    rng: np.random.Generator,
    keep_rows: bool,
) -> EpochPlan:
    """The window with row `source[n]` in place n, and samples exchanged within its turns."""
    packing, ranks = _packing(part), part.ranks
    place = np.empty_like(source)
    place[source] = np.arange(len(source))
    row = place[part.micro_batch_of_part()]
    if not keep_rows:
        whole = np.flatnonzero(~packing.is_split)
        weight = marginal_cost(cost, part.seq_len[part.sample[whole]])
        load = np.bincount(row[whole], weights=weight, minlength=len(source))
        fixed, taken = micro_batch_costs(part, cost)[source] - load, packing.split_tokens[source]
        tokens = packing.footprint(packing.tokens[whole])
        rows = (fixed, packing.capacity - taken, packing.segments)
        row[whole] = _exchange(row[whole], weight, tokens, *rows, speed, rng)
    shape = RowShape(**{name: getattr(packing, name) for name in RowShape.__dataclass_fields__})
    steps = PlacedSteps(
        sample=part.sample,
        step=row // ranks,
        rank=row % ranks,
        tokens=packing.tokens,
        offset=packing.offset,
        is_split=packing.is_split,
        split_tokens=packing.split_tokens[source][::ranks],
    )
    found = packed_epoch([steps], shape, topology, part.seq_len, rng)
    if part.repetition is None:
        return replace(found, counts=part.counts)
    first = np.full(len(part.seq_len), np.iinfo(np.int64).max)
    np.minimum.at(first, part.sample, part.repetition)
    repetition = number_repetitions(found) + first[found.sample]
    return replace(found, counts=part.counts, repetition=repetition)


def _exchange(
    row: np.ndarray,
    weight: np.ndarray,
    tokens: np.ndarray,
    fixed: np.ndarray,
    room: np.ndarray,
    slots: int,
    speed: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Divides samples of a turn's slowest rank and of another one anew, again and again.

    Args:
      row, weight, tokens: [N], the row of each sample, its marginal cost, and what it takes there.
      fixed, room: [B], what each row costs without these samples, and its tokens.
      slots: most samples of a row.
      speed: [ranks].
      rng: chooses the other rank, and samples.

    Returns:
      [N] int64, the row of each sample; no turn takes longer than before.
    """
    ranks, count = len(speed), np.bincount(row, minlength=len(fixed))
    turns, width = len(fixed) // ranks, max(_ITEMS, slots, int(count.max()))
    # Whole numbers, so that sums of floats are exact and equal on all machines.
    unit = 2.0 ** (math.frexp(float(weight.sum()))[1] - 45)
    values = np.stack([np.rint(weight / unit), tokens, np.ones(len(row))])
    values = np.concatenate([values, np.zeros((3, 1))], axis=1)  # the last one is no sample
    totals = np.stack([np.bincount(row, each[:-1], len(count)) for each in values])
    order = np.argsort(row, kind="stable")
    within = np.arange(len(order)) - (np.cumsum(count) - count)[row[order]]
    items = np.full((len(count), width), -1)
    items[row[order], within] = order
    each, subsets = np.arange(turns), _SUBSETS.T.astype(np.float64)
    for _ in range(min(32 * ranks, _MOST_SWEEPS) if ranks > 1 else 0):
        time = ((fixed + totals[0] * unit).reshape(turns, ranks)) / speed
        slowest = time.argmax(axis=1)
        others = np.where(rng.random((turns, 1)) < 0.5, time, rng.random(time.shape))
        others[each, slowest] = np.inf
        of_pair = np.stack([slowest, others.argmin(axis=1)], axis=1)
        pair = each[:, None] * ranks + of_pair
        both = items[pair].reshape(turns, -1)
        drawn = np.where(both >= 0, rng.random(both.shape), 2.0)
        chosen = np.argsort(drawn, axis=1, kind="stable")[:, :_ITEMS]
        item = np.take_along_axis(both, chosen, axis=1)
        of_item = values[:, item]  # [3, turns, items]
        kept = totals[:, pair]  # [3, turns, 2]
        mine = chosen < width
        kept = kept - np.stack([(of_item * mine).sum(-1), (of_item * ~mine).sum(-1)], -1)
        first = kept[..., :1] + of_item @ subsets  # [3, turns, subsets]
        second = kept[..., 1:] + of_item.sum(-1, keepdims=True) - of_item @ subsets
        fits = (first[1] <= room[pair[:, :1]]) & (second[1] <= room[pair[:, 1:]])
        fits &= np.maximum(first[2], second[2]) <= slots
        times = [
            (fixed[pair[:, n], None] + load * unit) / speed[of_pair[:, n], None]
            for n, load in enumerate((first[0], second[0]))
        ]
        after = np.where(fits, np.maximum(*times), np.inf)
        best = after.argmin(axis=1)
        better = np.flatnonzero(after[each, best] * _EXACT < time[each, slowest])
        goes = np.repeat([[0, 1]], width, axis=1).repeat(turns, axis=0)
        np.put_along_axis(goes, chosen, 1 - _SUBSETS[best], axis=1)
        for member, total in enumerate((first, second)):
            kept_here = (both >= 0) & (goes == member)
            left = np.argsort(~kept_here, axis=1, kind="stable")[:, :width]
            held = np.where(
                np.take_along_axis(kept_here, left, axis=1),
                np.take_along_axis(both, left, axis=1),
                -1,
            )
            items[pair[better, member]] = held[better]
            totals[:, pair[better, member]] = total[:, better, best[better]]
    found = np.empty_like(row)
    found[items[items >= 0]] = np.nonzero(items >= 0)[0]
    return found
