"""Samples that cost more than a rank's fair share, split over a context-parallel group.

The first A tokens of each rank's row are its split region. The c regions of a group hold c·A split
tokens, in which the group's split samples lie one after another (an all-to-all turns tokens into
heads and back). Every A is a program to compile, so only a few split sizes are allowed.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from alload_jax.planning.policies.ladder import best_steps

_CHUNKS = 4
"""Bins are ranked again after each 1/4 of them got a sample: finer gains nothing measurable."""
_JITTER = 0.3
"""Relative random error of a bin's need: equal windows get new rows, which are as well balanced."""

Need = Literal["cost_per_token", "cost", "free_tokens"]

UNPLACED = -1
"""The bin of an item that is in none."""


@dataclass(frozen=True)
class Bins:
    """Bins that are being filled; the arrays change as items are assigned.

    Attributes:
      free: [B] int64, tokens that still fit.
      load: [B] float64, cost so far.
      free_slots: [B] int64, items that still fit.
      max_load: no item is added to a bin that holds some, if that takes it over this.
    """

    free: np.ndarray
    load: np.ndarray
    free_slots: np.ndarray
    max_load: float


def target_load(weights: np.ndarray, bins: int, load: float = 0.0) -> float:
    """The cost that every bin should reach.

    It is the mean cost of the bins, without the oversized items, which cost more than it, and
    without the bins that these take for themselves.

    Args:
      weights: [N], largest first.
      bins: their number.
      load: total cost of the items that the bins already contain.
    """
    rest = float(weights.sum()) + load
    for oversized, weight in enumerate(weights[: bins - 1].tolist()):
        if weight <= rest / (bins - oversized):
            return rest / (bins - oversized)
        rest -= weight
    return rest / max(1, bins - len(weights[: bins - 1]))


def assign_greedily(
    footprint: np.ndarray,
    weight: np.ndarray,
    bins: Bins,
    target: float,
    rng: np.random.Generator | None = None,
    need_of: Need = "cost_per_token",
) -> np.ndarray:
    """Gives each item a bin, the longest first, where cost per free token is needed most.

    A bin that has `free` tokens left and lacks `target - load` cost needs items of that density.
    Density grows with length, so the longest item goes where the need is greatest. What remains
    at the end are short items and bins that need little. This makes both sums about equal.

    Args:
      footprint: [N] int64, tokens that an item takes, largest first.
      weight: [N] float64, its cost, also in descending order.
      bins: what is filled.
      target: cost that every bin should reach.
      rng: varies the choice among bins of about equal need; None for no variation.
      need_of: what the bin that is chosen has most of: missing cost per free token, missing cost,
        which is longest processing time first, or free tokens.

    Returns:
      [N] int64, each item's bin, or UNPLACED.
    """
    found = np.full(len(footprint), UNPLACED, np.int64)
    chunk = max(1, len(bins.free) // _CHUNKS)
    first = 0
    while first < len(footprint):
        longest = int(footprint[first])
        fits = (bins.free >= longest) & (bins.free_slots > 0)
        if np.isfinite(bins.max_load):
            fits &= (bins.load + float(weight[first]) <= bins.max_load) | (bins.load == 0)
        admitted = np.flatnonzero(fits)
        if not len(admitted):
            # The next item that is shorter, and no longer than the freest bin.
            most = int(bins.free[bins.free_slots > 0].max(initial=0))
            shorter = int(np.searchsorted(-footprint, -min(most, longest - 1)))
            first = max(first + 1, shorter)
            continue
        need = target - bins.load[admitted]
        if need_of == "cost_per_token":
            need /= np.maximum(bins.free[admitted], 1)
        elif need_of == "free_tokens":
            need = bins.free[admitted].astype(np.float64)
        if rng is not None:
            need *= 1 + _JITTER * rng.standard_normal(len(need), np.float32)
        count = min(chunk, len(footprint) - first, len(admitted))
        chosen = np.argpartition(-need, count - 1)[:count]
        chosen = admitted[chosen[np.argsort(-need[chosen], kind="stable")]]
        items = slice(first, first + count)
        found[items] = chosen
        bins.free[chosen] -= footprint[items]
        bins.load[chosen] += weight[items]
        bins.free_slots[chosen] -= 1
        first += count
    return found


_MOST_SIZES = 4
"""Maximum number of allowed split sizes, not counting 0."""
_MOST_TRIED = 100
"""Sizes among which those are chosen."""
_STEPS_OF_ROW = 128
"""The unit of A is at most this share of a row."""
_MARGIN = 1.25
"""The largest A over what the mean group needs, at least."""


@dataclass(frozen=True)
class SplitRule:
    """Which samples are split, and the split regions that they may be put into.

    Attributes:
      context: c, ranks of a group.
      capacity: tokens of a row.
      longest_whole: samples that take more tokens are split.
      split_sizes: [L] int64, the allowed values of A, ascending from 0.
      segments: most samples of a group's split regions.
    """

    context: int
    capacity: int
    longest_whole: int
    split_sizes: np.ndarray
    segments: int

    def applies(self, footprint: np.ndarray) -> np.ndarray:
        """[N] bool: which samples are split."""
        if self.context == 1:
            return np.zeros(len(footprint), bool)
        return np.asarray(footprint > self.longest_whole)


@dataclass(frozen=True)
class SplitRegions:
    """What the split regions of a window's groups hold.

    Attributes:
      group: [N] int64, the group whose split regions hold a sample, or UNPLACED.
      tokens: [G] int64, A of each group.
      load: [G] float64, weight of what the group's split regions hold.
    """

    group: np.ndarray
    tokens: np.ndarray
    load: np.ndarray


def fill_split_regions(
    rule: SplitRule,
    footprint: np.ndarray,
    weight: np.ndarray,
    groups: int,
    per_step: int,
    max_load: float,
) -> SplitRegions:
    """Assigns split samples to groups, then short samples to what the regions leave free.

    Groups of similar load are put into the same steps and get the same A.

    Args:
      rule: which samples are split.
      footprint, weight: [N], of the window's samples, longest first.
      groups: G, a multiple of `per_step`.
      per_step: groups of a step.
      max_load: most weight of a rank's row that holds more than one sample.
    """
    bins = Bins(
        np.full(groups, rule.context * rule.split_sizes[-1]),
        np.zeros(groups),
        np.full(groups, rule.segments),
        rule.context * max_load,
    )
    found = np.full(len(footprint), UNPLACED, np.int64)
    split = rule.applies(footprint)
    found[split] = assign_greedily(
        footprint[split], weight[split], bins, target_load(weight[split], groups)
    )
    used = rule.context * rule.split_sizes[-1] - bins.free
    # The least allowed A that holds all groups of a step, which are of similar load.
    order = np.argsort(-used, kind="stable")
    most = used[order][::per_step]
    size = rule.split_sizes[np.searchsorted(rule.split_sizes * rule.context, most)]
    tokens = np.empty_like(used)
    tokens[order] = np.repeat(size, per_step)
    bins.free[:] = rule.context * tokens - used
    others = np.flatnonzero(~split & (footprint <= bins.free.max(initial=0)))
    found[others] = assign_greedily(
        footprint[others], weight[others], bins, float(bins.load.max(initial=0))
    )
    return SplitRegions(found, tokens, bins.load)


def allowed_split_sizes(
    footprint: np.ndarray,
    weight: np.ndarray,
    rule: SplitRule,
    groups: int,
    per_step: int,
    align: int,
) -> np.ndarray:
    """The few values of A that leave least of the regions empty, for samples like these.

    They are multiples of a number that is as large as a power of two times `align` can be, of
    which `_STEPS_OF_ROW` or more make up a row, so that kernels' blocks divide regions evenly.

    Args:
      footprint, weight: [N], of a window's samples, longest first.
      rule: its split_sizes are not read.
      groups, per_step: see `fill_split_regions`.
      align: of samples' beginnings.
    """
    split = rule.applies(footprint)
    if not split.any():
        return np.zeros(1, np.int64)
    multiple = align
    while rule.capacity % (2 * multiple) == 0 and 2 * multiple * _STEPS_OF_ROW <= rule.capacity:
        multiple *= 2
    most = rule.context * rule.capacity
    bins = Bins(np.full(groups, most), np.zeros(groups), np.full(groups, len(footprint)), np.inf)
    assign_greedily(footprint[split], weight[split], bins, target_load(weight[split], groups))
    used = np.sort(most - bins.free)[::-1][::per_step]
    wanted = -(-used // (rule.context * multiple)) * multiple
    # The longest of all must fit, even alone. More than the mean must fit too, or more and more
    # split samples would be deferred.
    demand = _MARGIN * footprint[split].sum() / groups
    for least in (int(footprint.max()), int(min(demand, most))):
        wanted = np.r_[wanted, -(-least // (rule.context * multiple)) * multiple]
    sizes, counts = np.unique(wanted, return_counts=True)
    tried = sizes[np.unique(np.linspace(0, len(sizes) - 1, _MOST_TRIED).round().astype(int))]
    chosen = best_steps(sizes, counts, tried, min(_MOST_SIZES, len(tried)))[-1]
    return np.unique(np.r_[0, chosen])


def split_evenly(
    start: np.ndarray, tokens: np.ndarray, region: np.ndarray, context: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cuts split samples into the ranks' parts.

    Args:
      start, tokens: [N] int64, where each sample lies in its group's split tokens.
      region: [N] int64, A of that group.
      context: ranks of a group.

    Returns:
      [P] each: the sample's position in the arguments, the rank within the group, the part's
      offset in that rank's row, and its tokens.
    """
    first, last = start // region, (start + tokens - 1) // region
    item = np.repeat(np.arange(len(start)), last - first + 1)
    before = np.cumsum(last - first + 1) - (last - first + 1)
    rank = first[item] + np.arange(len(item)) - before[item]
    assert not len(rank) or rank.max() < context
    begin = np.maximum(start[item], rank * region[item])
    end = np.minimum((start + tokens)[item], (rank + 1) * region[item])
    return item, rank, begin - rank * region[item], end - begin
