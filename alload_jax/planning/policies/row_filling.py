"""Fills the rows of a window with samples, by one of several strategies."""

from dataclasses import dataclass

import numpy as np

from alload_jax.planning.epoch import RowShape
from alload_jax.planning.policies.first_fit import first_fit_decreasing
from alload_jax.planning.policies.greedy import UNPLACED, Bins, assign_greedily, target_load
from alload_jax.planning.policies.grouping import SampleBounds
from alload_jax.planning.policies.queue import Window
from alload_jax.planning.policies.splitting import SplitRegions, SplitRule, fill_split_regions

FIRST_FIT = "first_fit_decreasing"
STRATEGIES = ("cost_per_token", FIRST_FIT, "longest_processing_time")
"""Ways to fill rows; a window takes the one whose steps take least time for their work. Only the
first splits samples and keeps an M_comp."""
_SHORT_MARGIN = 1.1
"""Samples of a row of one long sample, over what the lower bound of a step asks of it."""


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
class FilledRows:
    """Samples in rows, not yet in steps.

    Attributes:
      regions: split samples in the groups' split regions.
      row: [N] int64, the row of each whole sample, or UNPLACED.
      load: [B] float64, cost of each row's samples and communication.
    """

    regions: SplitRegions
    row: np.ndarray
    load: np.ndarray


@dataclass(frozen=True)
class RowFiller:
    """Fills rows.

    Attributes:
      shape: of the rows.
      rule: which samples are split.
      costs: of the rows.
      weights: [N], what each sample of the manifest costs beyond padding of its length.
      ranks: data-parallel ranks.
      mean_row_tokens: that a row holds on average.
      bounds: on the samples of a step; None for none.
      rng: generator of the choice among rows.
    """

    shape: RowShape
    rule: SplitRule
    costs: RowCosts
    weights: np.ndarray
    ranks: int
    mean_row_tokens: float
    bounds: SampleBounds | None
    rng: np.random.Generator

    @property
    def groups_per_step(self) -> int:
        """Context-parallel groups."""
        return self.ranks // self.rule.context

    @property
    def step_tokens(self) -> float:
        """Tokens that a step holds on average."""
        return self.ranks * self.mean_row_tokens

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies that keep to what rows must."""
        any_row = self.rule.context == 1 and not self.costs.bounded
        return STRATEGIES if any_row else STRATEGIES[:1]

    def fill(self, window: Window, strategy: str, steps: int) -> FilledRows:
        """Samples to groups' split regions, the others to ranks' rows."""
        context, weight = self.rule.context, self.weights[window.sample]
        if strategy == FIRST_FIT:
            return self._first_fit(window, weight)
        regions = fill_split_regions(
            self.rule,
            window.footprint,
            weight,
            steps * self.groups_per_step,
            self.groups_per_step,
            self.costs.max_load,
        )
        whole = (regions.group == UNPLACED) & ~self.rule.applies(window.footprint)
        bins = self._bins(regions)
        row = self._assign_whole(window, weight, whole, bins, strategy)
        load = bins.load
        if not self.costs.bounded:  # a row that moves may come to cost more
            row, load = _regrouped(row, load, regions, context)
        return FilledRows(regions, row, load)

    def _bins(self, regions: SplitRegions) -> Bins:
        """The ranks' rows behind their split regions."""
        context = self.rule.context
        region_tokens = np.repeat(regions.tokens, context)
        return Bins(
            free=self.shape.capacity - region_tokens,
            load=np.repeat(regions.load / context, context)
            + self.costs.per_split_token * region_tokens,
            free_slots=np.full(len(region_tokens), self.shape.segments),
            max_load=self.costs.max_load,
        )

    def _assign_whole(
        self, window: Window, weight: np.ndarray, whole: np.ndarray, bins: Bins, strategy: str
    ) -> np.ndarray:
        """The row of each sample that is not split, or UNPLACED: [N] int64."""
        row = np.full(len(window.sample), UNPLACED, np.int64)
        per_token = strategy != "longest_processing_time"

        def assign(mask: np.ndarray) -> None:
            target = target_load(weight[mask], len(bins.free), float(bins.load.sum()))
            row[mask] = assign_greedily(
                window.footprint[mask], weight[mask], bins, target, self.rng, per_token
            )

        if self.bounds is not None:
            target = target_load(weight[whole], len(bins.free), float(bins.load.sum()))
            assign(whole & (weight > target))
            sparse = np.flatnonzero(bins.load > target)
            self._add_short(window, whole & (row == UNPLACED), row, bins, sparse)
        assign(whole & (row == UNPLACED))
        return row

    def _add_short(
        self, window: Window, mask: np.ndarray, row: np.ndarray, bins: Bins, sparse: np.ndarray
    ) -> None:
        """Adds short samples to rows of one long one, so that steps of these hold enough.

        They are drawn from those of which any will fit, or else they are the shortest.

        Args:
          window: the window.
          mask: [N] bool, samples that may be added.
          row: [N] int64, the row of each sample; changed.
          bins: the rows; changed.
          sparse: [K] int64, the rows.
        """
        assert self.bounds is not None
        wanted = int(np.ceil(_SHORT_MARGIN * self.bounds.least / self.ranks)) - 1
        if wanted < 1 or not len(sparse):
            return
        short = np.flatnonzero(mask)
        any_fit = short[window.footprint[short] <= bins.free[sparse].min() // wanted]
        count = wanted * len(sparse)
        chosen = self.rng.permutation(any_fit) if len(any_fit) >= count else short[::-1]
        each = min(wanted, len(chosen) // len(sparse))
        if not each:
            return
        items = chosen[: each * len(sparse)].reshape(each, len(sparse))
        footprint = window.footprint[items]
        fits = np.cumsum(footprint, axis=0) <= bins.free[sparse]
        fits &= np.arange(1, each + 1)[:, None] <= bins.free_slots[sparse]
        row[items[fits]] = np.broadcast_to(sparse, items.shape)[fits]
        weight = self.weights[window.sample[items]]
        bins.free[sparse] -= np.where(fits, footprint, 0).sum(axis=0)
        bins.load[sparse] += np.where(fits, weight, 0.0).sum(axis=0)
        bins.free_slots[sparse] -= fits.sum(axis=0)

    def _first_fit(self, window: Window, weight: np.ndarray) -> FilledRows:
        """Rows that first-fit decreasing fills, without regard to their cost."""
        row, rows = first_fit_decreasing(window.footprint, self.shape)
        none = np.zeros(rows, np.int64)
        regions = SplitRegions(np.full(len(row), UNPLACED), none, none.astype(np.float64))
        return FilledRows(regions, row, np.bincount(row, weights=weight, minlength=rows))


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
