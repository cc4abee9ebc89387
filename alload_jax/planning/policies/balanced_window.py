"""Places one window of samples after another for `balanced`: deal, gather, lay out."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alload_jax.planning.policies.anchors import (
    AnchorRule,
    Regions,
    fill_regions,
    split_evenly,
)
from alload_jax.planning.policies.dealing import LEFT, Bins, deal, water_level
from alload_jax.planning.policies.gathering import NOBODY, gather
from alload_jax.planning.policies.packed import PlacedSteps, RowShape
from alload_jax.planning.policies.queue import Window
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
      weights: [N], what each sample of the manifest costs beyond filler of its length.
      samples: the manifest's.
      rng: decides the order of steps, and of groups within them.
    """

    policy: "Balanced"
    shape: RowShape
    rule: AnchorRule
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
            if not (must & (regions.group == LEFT) & (row == LEFT)).any():
                return self._gather(window, must, regions, bins, row)
        raise AssertionError("unreachable")

    def _deal(
        self, window: Window, first: np.ndarray, steps: int
    ) -> tuple[Regions, Bins, np.ndarray]:
        """Regions of groups, then rows of ranks: [N] each, LEFT where a sample is not placed."""
        context, weight = self.policy.context, self.weights[window.sample]
        per_step = self.ranks // context
        regions = fill_regions(
            self.rule,
            window.footprint,
            weight,
            first,
            steps * per_step,
            per_step,
            self.policy.most_load(self.shape),
        )
        anchors = np.repeat(regions.tokens, context)
        bins = Bins(
            free=self.shape.tokens - anchors,
            load=np.repeat(regions.load / context, context) + self.policy.anchor_seconds * anchors,
            room=np.full(len(anchors), self.shape.segments),
            most_load=self.policy.most_load(self.shape),
        )
        row = np.full(len(window.sample), LEFT, np.int64)
        whole = (regions.group == LEFT) & ~self.rule.applies(window.footprint, weight)
        for mask in (whole & first, whole & ~first):
            level = water_level(weight[mask], len(bins.free), float(bins.load.sum()))
            row[mask] = deal(window.footprint[mask], weight[mask], bins, level)
        return regions, bins, row

    def _row_cost(self) -> float:
        """What a row costs before anything lies in it."""
        return self.policy.cost.launch + float(
            self.policy.cost.of_filler(np.asarray(self.shape.tokens))
        )

    def _gather(
        self, window: Window, must: np.ndarray, regions: Regions, bins: Bins, row: np.ndarray
    ) -> tuple[PlacedSteps, np.ndarray]:
        """Steps of groups that cost the same, in random order."""
        context = self.policy.context
        load = bins.load
        if self.policy.m_comp is None:  # a row that moves may come to cost more
            row, load = _regrouped(row, load, regions, context)
        group = np.where(row == LEFT, regions.group, row // context)
        bound = np.zeros(len(regions.tokens), bool)
        bound[group[must & (group != LEFT)]] = True
        cost = self._row_cost() + load.reshape(-1, context)
        per_step = self.ranks // context
        gathered, tokens = [], []
        for level in np.unique(regions.tokens):
            same = np.flatnonzero(regions.tokens == level)
            chosen = gather(cost[same].max(axis=1), cost[same].mean(axis=1), bound[same], per_step)
            gathered.append(np.where(chosen == NOBODY, NOBODY, same[chosen]))
            tokens.append(np.full(len(chosen), level))
        order = self.rng.permutation(sum(map(len, tokens)))
        steps = self.rng.permuted(np.concatenate(gathered)[order], axis=1)
        place = np.full(len(regions.tokens) + 1, LEFT, np.int64)
        place[steps.ravel()] = np.arange(steps.size)
        place[NOBODY] = LEFT
        at = np.where(group == LEFT, LEFT, place[group])
        placed = at != LEFT
        parts = self._parts(window, regions, row, at, np.concatenate(tokens)[order])
        return parts, placed

    def _parts(
        self,
        window: Window,
        regions: Regions,
        row: np.ndarray,
        at: np.ndarray,
        anchor_tokens: np.ndarray,
    ) -> PlacedSteps:
        """Turns (group, row) into (step, rank), and anchors into their ranks' parts."""
        context, per_step = self.policy.context, self.ranks // self.policy.context
        seq_len = self.samples.seq_len[window.sample]
        whole = np.flatnonzero((at != LEFT) & (row != LEFT))
        split = np.flatnonzero((at != LEFT) & (row == LEFT))
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
            anchor=np.r_[np.zeros(len(whole), bool), np.ones(len(item), bool)],
            anchor_tokens=anchor_tokens,
        )


def _regrouped(
    row: np.ndarray, load: np.ndarray, regions: Regions, context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Puts rows of like cost into a group, the costlier ones where anchors weigh less.

    Any row may move to any group of the same A.

    Args:
      row: [N] int64, the row of each sample, or LEFT.
      load: [B] float64, of each row, anchors included.
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
    return np.where(row == LEFT, LEFT, moved_to[row]), moved + split
