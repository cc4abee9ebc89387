"""Places one window of samples after another for `balanced`: assign, group, lay out."""

import itertools
from dataclasses import dataclass

import numpy as np

from alload_jax.planning.epoch import RowShape
from alload_jax.planning.policies.greedy import UNPLACED, Bins, assign_greedily, target_load
from alload_jax.planning.policies.grouping import EMPTY, group_into_steps
from alload_jax.planning.policies.packed import PlacedSteps
from alload_jax.planning.policies.queue import Window
from alload_jax.planning.policies.splitting import (
    SplitRegions,
    SplitRule,
    fill_split_regions,
    split_evenly,
)
from alload_jax.planning.samples import Samples

_GROWTH = 1.3
"""Factor by which the added steps grow while a window's steps do not hold all that must go."""


@dataclass(frozen=True)
class RowCosts:
    """Costs of rows apart from their samples, and the maximum weight of these.

    Attributes:
      empty: cost of a row of padding.
      per_split_token: cost of communication for each of the A tokens of a rank.
      bounded: whether there is an M_comp.
      max_load: most weight of a row that holds more than one sample; inf without M_comp.
    """

    empty: float
    per_split_token: float
    bounded: bool
    max_load: float


@dataclass(frozen=True)
class WindowPlanner:
    """Places one window after another.

    Attributes:
      shape: of the rows.
      rule: which samples are split.
      costs: of the rows.
      weights: [N], what each sample of the manifest costs beyond padding of its length.
      samples: the manifest's.
      ranks: data-parallel ranks.
      steps: of a window.
      mean_row_tokens: that a row holds on average.
      max_delay: windows that may defer a sample.
      rng: generator of the order of steps, and of groups within them.
    """

    shape: RowShape
    rule: SplitRule
    costs: RowCosts
    weights: np.ndarray
    samples: Samples
    ranks: int
    steps: int
    mean_row_tokens: float
    max_delay: int
    rng: np.random.Generator

    @property
    def groups_per_step(self) -> int:
        """Context-parallel groups."""
        return self.ranks // self.rule.context

    def place(self, window: Window) -> tuple[PlacedSteps, np.ndarray]:
        """The steps, and a mask of the samples that they hold."""
        overdue = window.age >= self.max_delay
        must = np.ones_like(overdue) if window.last else overdue
        steps = self.steps
        if window.last:
            steps = int(np.ceil(window.footprint.sum() / (self.ranks * self.mean_row_tokens)))
        for attempt in itertools.count():
            # One step more at first; where much is missing, soon many more.
            more = int(_GROWTH**attempt) if attempt else 0
            regions, bins, row = self._assign(window, overdue, steps + more)
            if not (must & (regions.group == UNPLACED) & (row == UNPLACED)).any():
                return self._group(window, must, regions, bins, row)
        raise AssertionError("unreachable")

    def _assign(
        self, window: Window, first: np.ndarray, steps: int
    ) -> tuple[SplitRegions, Bins, np.ndarray]:
        """Samples to groups' split regions, the others to ranks' rows: [N] each, or UNPLACED."""
        context, weight = self.rule.context, self.weights[window.sample]
        regions = fill_split_regions(
            self.rule,
            window.footprint,
            weight,
            first,
            steps * self.groups_per_step,
            self.groups_per_step,
            self.costs.max_load,
        )
        region_tokens = np.repeat(regions.tokens, context)
        bins = Bins(
            free=self.shape.capacity - region_tokens,
            load=np.repeat(regions.load / context, context)
            + self.costs.per_split_token * region_tokens,
            free_slots=np.full(len(region_tokens), self.shape.segments),
            max_load=self.costs.max_load,
        )
        row = np.full(len(window.sample), UNPLACED, np.int64)
        whole = (regions.group == UNPLACED) & ~self.rule.applies(window.footprint, weight)
        for mask in (whole & first, whole & ~first):
            target = target_load(weight[mask], len(bins.free), float(bins.load.sum()))
            row[mask] = assign_greedily(window.footprint[mask], weight[mask], bins, target)
        return regions, bins, row

    def _group(
        self, window: Window, must: np.ndarray, regions: SplitRegions, bins: Bins, row: np.ndarray
    ) -> tuple[PlacedSteps, np.ndarray]:
        """Steps of groups that cost the same, in random order."""
        context = self.rule.context
        load = bins.load
        if not self.costs.bounded:  # a row that moves may come to cost more
            row, load = _regrouped(row, load, regions, context)
        group = np.where(row == UNPLACED, regions.group, row // context)
        urgent = np.zeros(len(regions.tokens), bool)
        urgent[group[must & (group != UNPLACED)]] = True
        cost = self.costs.empty + load.reshape(-1, context)
        steps, split_tokens = self._steps_of(regions, cost, urgent)
        order = self.rng.permutation(len(steps))
        steps = self.rng.permuted(steps[order], axis=1)
        place = np.full(len(regions.tokens) + 1, UNPLACED, np.int64)
        place[steps.ravel()] = np.arange(steps.size)
        place[EMPTY] = UNPLACED
        at = np.where(group == UNPLACED, UNPLACED, place[group])
        return self._parts(window, regions, row, at, split_tokens[order]), at != UNPLACED

    def _steps_of(
        self, regions: SplitRegions, cost: np.ndarray, urgent: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Groups of equal A and about equal cost in a step.

        Args:
          regions: of the G groups.
          cost: [G, context], of each row.
          urgent: [G] bool, groups that can't be deferred.

        Returns:
          [K, groups_per_step] int64, groups or EMPTY, and [K] int64, A of each step.
        """
        steps, tokens = [], []
        for size in np.unique(regions.tokens):
            same = np.flatnonzero(regions.tokens == size)
            chosen = group_into_steps(
                cost[same].max(axis=1), cost[same].mean(axis=1), urgent[same], self.groups_per_step
            )
            steps.append(np.where(chosen == EMPTY, EMPTY, same[chosen]))
            tokens.append(np.full(len(chosen), size))
        return np.concatenate(steps), np.concatenate(tokens)

    def _parts(
        self,
        window: Window,
        regions: SplitRegions,
        row: np.ndarray,
        at: np.ndarray,
        split_tokens: np.ndarray,
    ) -> PlacedSteps:
        """Turns (group, row) into (step, rank), and split samples into their ranks' parts."""
        context = self.rule.context
        seq_len = self.samples.seq_len[window.sample]
        whole = np.flatnonzero((at != UNPLACED) & (row != UNPLACED))
        split = np.flatnonzero((at != UNPLACED) & (row == UNPLACED))
        split = split[np.argsort(regions.group[split], kind="stable")]
        group = regions.group[split]
        item, member, offset, tokens = split_evenly(
            _starts(group, window.footprint[split]), seq_len[split], regions.tokens[group], context
        )
        of = np.r_[whole, split[item]]
        step, place_in_step = np.divmod(at[of], self.groups_per_step)
        return PlacedSteps(
            sample=window.sample[of],
            step=step,
            rank=place_in_step * context + np.r_[row[whole] % context, member],
            tokens=np.r_[seq_len[whole], tokens],
            offset=np.r_[np.zeros(len(whole), np.int64), offset],
            is_split=np.r_[np.zeros(len(whole), bool), np.ones(len(item), bool)],
            split_tokens=split_tokens,
        )


def _starts(group: np.ndarray, footprint: np.ndarray) -> np.ndarray:
    """[N]: where each sample begins in its group's split tokens; samples are sorted by group."""
    before = np.cumsum(footprint) - footprint
    opens = np.r_[True, group[1:] != group[:-1]] if len(group) else np.zeros(0, bool)
    return before - np.maximum.accumulate(np.where(opens, before, 0))


def _regrouped(
    row: np.ndarray, load: np.ndarray, regions: SplitRegions, context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Puts rows of about equal cost into a group, the costlier ones where split samples weigh less.

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
