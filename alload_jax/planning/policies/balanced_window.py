"""Places one window of samples after another for `balanced`: assign, group, lay out."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alload_jax.planning.policies.greedy import UNPLACED, Bins, assign_greedily, target_load
from alload_jax.planning.policies.grouping import EMPTY, group_into_steps
from alload_jax.planning.policies.packed import PlacedSteps, RowShape
from alload_jax.planning.policies.queue import Window
from alload_jax.planning.policies.splitting import (
    SplitRegions,
    SplitRule,
    fill_split_regions,
    split_evenly,
)
from alload_jax.planning.samples import Samples

if TYPE_CHECKING:
    from alload_jax.planning.policies.balanced import Balanced

_GROWTH = 1.3
"""Of the steps added to a window into which not all fits that must go."""


@dataclass(frozen=True)
class WindowPlanner:
    """Places one window after another.

    Attributes:
      policy: its bounds and costs.
      shape: of the rows.
      rule: which samples are split.
      ranks: data-parallel ranks.
      steps: of a window.
      row_tokens: that a row holds on average.
      weights: [N], what each sample of the manifest costs beyond padding of its length.
      samples: the manifest's.
      rng: decides the order of steps, and of groups within them.
    """

    policy: "Balanced"
    shape: RowShape
    rule: SplitRule
    ranks: int
    steps: int
    row_tokens: float
    weights: np.ndarray
    samples: Samples
    rng: np.random.Generator

    def place(self, window: Window) -> tuple[PlacedSteps, np.ndarray]:
        """The steps, and a mask of the samples that they hold."""
        waited = window.age >= self.policy.max_delay
        must = np.ones_like(waited) if window.last else waited
        steps = self.steps
        if window.last:
            steps = int(np.ceil(window.footprint.sum() / (self.ranks * self.row_tokens)))
        for attempt in itertools.count():
            # One step more at first; where much is missing, soon many more.
            more = int(_GROWTH**attempt) if attempt else 0
            regions, bins, row = self._deal(window, waited, steps + more)
            if not (must & (regions.group == UNPLACED) & (row == UNPLACED)).any():
                return self._gather(window, must, regions, bins, row)
        raise AssertionError("unreachable")

    def _deal(
        self, window: Window, first: np.ndarray, steps: int
    ) -> tuple[SplitRegions, Bins, np.ndarray]:
        """Split regions of groups, then rows of ranks: [N] each, or UNPLACED."""
        context, weight = self.policy.context, self.weights[window.sample]
        per_step = self.ranks // context
        regions = fill_split_regions(
            self.rule,
            window.footprint,
            weight,
            first,
            steps * per_step,
            per_step,
            self.policy.most_load(self.shape),
        )
        region_tokens = np.repeat(regions.tokens, context)
        bins = Bins(
            free=self.shape.tokens - region_tokens,
            load=np.repeat(regions.load / context, context)
            + self.policy.seconds_per_split_token * region_tokens,
            free_slots=np.full(len(region_tokens), self.shape.segments),
            most_load=self.policy.most_load(self.shape),
        )
        row = np.full(len(window.sample), UNPLACED, np.int64)
        whole = (regions.group == UNPLACED) & ~self.rule.applies(window.footprint, weight)
        for mask in (whole & first, whole & ~first):
            level = target_load(weight[mask], len(bins.free), float(bins.load.sum()))
            row[mask] = assign_greedily(window.footprint[mask], weight[mask], bins, level)
        return regions, bins, row

    def _row_cost(self) -> float:
        """What a row costs before anything lies in it."""
        return self.policy.cost.fixed_cost + float(
            self.policy.cost.padding_cost(np.asarray(self.shape.tokens))
        )

    def _gather(
        self, window: Window, must: np.ndarray, regions: SplitRegions, bins: Bins, row: np.ndarray
    ) -> tuple[PlacedSteps, np.ndarray]:
        """Steps of groups that cost the same, in random order."""
        context = self.policy.context
        load = bins.load
        if self.policy.m_comp is None:  # a row that moves may come to cost more
            row, load = _regrouped(row, load, regions, context)
        group = np.where(row == UNPLACED, regions.group, row // context)
        bound = np.zeros(len(regions.tokens), bool)
        bound[group[must & (group != UNPLACED)]] = True
        cost = self._row_cost() + load.reshape(-1, context)
        per_step = self.ranks // context
        gathered, tokens = [], []
        for level in np.unique(regions.tokens):
            same = np.flatnonzero(regions.tokens == level)
            chosen = group_into_steps(
                cost[same].max(axis=1), cost[same].mean(axis=1), bound[same], per_step
            )
            gathered.append(np.where(chosen == EMPTY, EMPTY, same[chosen]))
            tokens.append(np.full(len(chosen), level))
        order = self.rng.permutation(sum(map(len, tokens)))
        steps = self.rng.permuted(np.concatenate(gathered)[order], axis=1)
        place = np.full(len(regions.tokens) + 1, UNPLACED, np.int64)
        place[steps.ravel()] = np.arange(steps.size)
        place[EMPTY] = UNPLACED
        at = np.where(group == UNPLACED, UNPLACED, place[group])
        placed = at != UNPLACED
        parts = self._parts(window, regions, row, at, np.concatenate(tokens)[order])
        return parts, placed

    def _parts(
        self,
        window: Window,
        regions: SplitRegions,
        row: np.ndarray,
        at: np.ndarray,
        split_tokens: np.ndarray,
    ) -> PlacedSteps:
        """Turns (group, row) into (step, rank), and split samples into their ranks' parts."""
        context, per_step = self.policy.context, self.ranks // self.policy.context
        seq_len = self.samples.seq_len[window.sample]
        whole = np.flatnonzero((at != UNPLACED) & (row != UNPLACED))
        split = np.flatnonzero((at != UNPLACED) & (row == UNPLACED))
        split = split[np.argsort(regions.group[split], kind="stable")]
        group = regions.group[split]
        taken = window.footprint[split]
        before = np.cumsum(taken) - taken
        opens = np.r_[True, group[1:] != group[:-1]] if len(group) else np.zeros(0, bool)
        start = before - np.maximum.accumulate(np.where(opens, before, 0))
        item, member, offset, tokens = split_evenly(
            start, seq_len[split], regions.tokens[group], context
        )
        of = np.r_[whole, split[item]]
        step, slot = np.divmod(at[of], per_step)
        inside = np.r_[row[whole] % context, member]
        return PlacedSteps(
            sample=window.sample[of],
            step=step,
            rank=slot * context + inside,
            tokens=np.r_[seq_len[whole], tokens],
            offset=np.r_[np.zeros(len(whole), np.int64), offset],
            is_split=np.r_[np.zeros(len(whole), bool), np.ones(len(item), bool)],
            split_tokens=split_tokens,
        )


def _regrouped(
    row: np.ndarray, load: np.ndarray, regions: SplitRegions, context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Puts rows of like cost into a group, the costlier ones where split samples weigh less.

    Any row may move to any group of the same A.

    Args:
      row: [N] int64, the row of each sample, or UNPLACED.
      load: [B] float64, of each row, split samples included.
      regions: of the groups.
      context: rows of a group.

    Returns:
      `row` and `load` after the moves.
    """
    if context == 1:
        return row, load
    split = np.repeat(regions.load / context, context)
    tokens = np.repeat(regions.tokens, context)
    whole = load - split
    moved_to = np.empty(len(load), np.int64)
    moved_to[np.lexsort((-whole, tokens))] = np.lexsort((split, tokens))
    moved = np.empty_like(load)
    moved[moved_to] = whole
    return np.where(row == UNPLACED, UNPLACED, moved_to[row]), moved + split
