"""Places one window of samples after another for `balanced`: assign, group, lay out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.epoch import RowShape
from alload_jax.planning.policies.first_fit import first_fit_decreasing
from alload_jax.planning.policies.greedy import UNPLACED, Bins, assign_greedily, target_load
from alload_jax.planning.policies.grouping import (
    EMPTY,
    TOLERANCE,
    SampleBounds,
    Units,
    group_into_steps,
)
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

STRATEGIES = ("cost_per_token", "first_fit_decreasing", "longest_processing_time")
"""Ways to fill rows; a window takes the one whose steps take least time for their work. Only the
first splits samples and keeps an M_comp."""
DUE_FIRST = "due_first"
"""As `cost_per_token`, with what must be placed gathered in few rows, so that others may wait."""
_SHORT_MARGIN = 1.1
"""Samples of a row of one long sample, over what the lower bound of a step asks of it."""
_EASED_BOUNDS = 0.2
"""Power of a window's easing by which the bounds on a step's samples widen."""
_CLOSE, _RETRY = 0.02, 8
"""A strategy that was this much slower is tried again only in every eighth window."""


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
class _Rows:
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
class _Candidate:
    """Steps made by one strategy.

    Attributes:
      rows: places for the window's samples in rows.
      sample: [N] int64, which of the window's samples, of equal tokens, takes each place.
      steps: [K, groups_per_step] int64, groups of rows, or EMPTY.
      split_tokens: [K] int64, A of each step.
      efficiency: work of the samples in the steps over the ranks' time; at most 1.
    """

    rows: _Rows
    sample: np.ndarray
    steps: np.ndarray
    split_tokens: np.ndarray
    efficiency: float


@dataclass(frozen=True)
class WindowPlanner:
    """Places one window after another.

    Attributes:
      shape: of the rows.
      rule: which samples are split.
      costs: of the rows.
      weights: [N], what each sample of the manifest costs beyond padding of its length.
      token_cost: what a token of padding costs.
      samples: the manifest's.
      ranks: data-parallel ranks.
      steps: of a window.
      mean_row_tokens: that a row holds on average.
      bounds: on the samples of a step; None for none.
      rng: generator of the choice among equals, and of the order of groups within a step.
    """

    shape: RowShape
    rule: SplitRule
    costs: RowCosts
    weights: np.ndarray
    token_cost: float
    samples: Samples
    ranks: int
    steps: int
    mean_row_tokens: float
    bounds: SampleBounds | None
    rng: np.random.Generator
    _strategies: "_Strategies" = field(default_factory=lambda: _Strategies())

    @property
    def groups_per_step(self) -> int:
        """Context-parallel groups."""
        return self.ranks // self.rule.context

    def place(self, window: Window) -> tuple[PlacedSteps, np.ndarray]:
        """The steps, and a mask of the samples that they hold."""
        best: _Candidate | None = None
        any_row = self.rule.context == 1 and not self.costs.bounded
        strategies = self._strategies.to_try(STRATEGIES if any_row else STRATEGIES[:1])
        if window.must.any() and not window.must.all():
            strategies.append(DUE_FIRST)
        for strategy in strategies:
            found = self._candidate(window, strategy)
            self._strategies.note(strategy, found.efficiency)
            if best is None or found.efficiency > best.efficiency:
                best = found
        assert best is not None
        return self._laid_out(window, best)

    def _candidate(self, window: Window, strategy: str) -> _Candidate:
        """The steps of one strategy, which hold all that must be placed."""
        wanted = float(window.footprint.sum()) / (self.ranks * self.mean_row_tokens)
        steps = max(1, min(self.steps, round(wanted)))
        if window.must.all():
            steps = int(np.ceil(wanted))
        # Even with a row for each sample, more steps than samples would not help.
        for more in _growing(len(window.sample)):
            rows = self._assign(window, strategy, steps + more)
            if found := self._grouped(window, rows):
                return found
        tokens = int(window.footprint[window.must].max())
        raise InputError(
            f"policy balanced: no row has room for a sample of {tokens} tokens; "
            "raise planning.m_mem or planning.m_comp"
        )

    def _assign(self, window: Window, strategy: str, steps: int) -> _Rows:
        """Samples to groups' split regions, the others to ranks' rows."""
        context, weight = self.rule.context, self.weights[window.sample]
        if strategy == "first_fit_decreasing":
            return self._first_fit(window, weight)
        regions = fill_split_regions(
            self.rule,
            window.footprint,
            weight,
            window.must,
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
        return _Rows(regions, row, load)

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

        def assign(mask: np.ndarray, into: Bins = bins) -> None:
            target = target_load(weight[mask], len(into.free), float(into.load.sum()))
            row[mask] = assign_greedily(
                window.footprint[mask], weight[mask], into, target, self.rng, per_token
            )

        if strategy == DUE_FIRST:
            due = whole & window.must
            tokens = float(window.footprint[due].sum())
            steps = int(np.ceil(tokens / (self.ranks * self.mean_row_tokens)))
            assign(due, bins.first(steps * self.ranks))
        if self.bounds is not None:
            target = target_load(weight[whole], len(bins.free), float(bins.load.sum()))
            assign(whole & (weight > target) & (row == UNPLACED))
            sparse = np.flatnonzero(bins.load > target)
            self._add_short(window, whole & (row == UNPLACED), row, bins, sparse)
        assign(whole & (row == UNPLACED))
        return row

    def _add_short(
        self, window: Window, mask: np.ndarray, row: np.ndarray, bins: Bins, sparse: np.ndarray
    ) -> None:
        """Adds the shortest samples to rows of one long one, so that steps of these hold enough.

        Args:
          window: the window.
          mask: [N] bool, samples that may be added.
          row: [N] int64, the row of each sample; changed.
          bins: the rows; changed.
          sparse: [K] int64, the rows.
        """
        assert self.bounds is not None
        wanted = int(np.ceil(_SHORT_MARGIN * self.bounds.least / self.ranks)) - 1
        shortest = np.flatnonzero(mask)[::-1][: wanted * len(sparse)]
        each = len(shortest) // len(sparse) if len(sparse) else 0
        if not each:
            return
        items = shortest[: each * len(sparse)].reshape(each, len(sparse))
        footprint = window.footprint[items]
        fits = np.cumsum(footprint, axis=0) <= bins.free[sparse]
        fits &= np.arange(1, each + 1)[:, None] <= bins.free_slots[sparse]
        row[items[fits]] = np.broadcast_to(sparse, items.shape)[fits]
        weight = self.weights[window.sample[items]]
        bins.free[sparse] -= np.where(fits, footprint, 0).sum(axis=0)
        bins.load[sparse] += np.where(fits, weight, 0.0).sum(axis=0)
        bins.free_slots[sparse] -= fits.sum(axis=0)

    def _first_fit(self, window: Window, weight: np.ndarray) -> _Rows:
        """Rows that first-fit decreasing fills, without regard to their cost."""
        row, rows = first_fit_decreasing(window.footprint, self.shape)
        none = np.zeros(rows, np.int64)
        regions = SplitRegions(np.full(len(row), UNPLACED), none, none.astype(np.float64))
        return _Rows(regions, row, np.bincount(row, weights=weight, minlength=rows))

    def _grouped(self, window: Window, rows: _Rows) -> _Candidate | None:
        """Steps of groups that cost the same, or None if rows lack what must be placed."""
        group = self._group_of(rows)
        groups = len(rows.regions.tokens)
        cost = self.costs.empty + rows.load.reshape(groups, self.rule.context)
        samples = np.bincount(group[group != UNPLACED], minlength=groups)
        urgent = np.zeros(groups, bool)
        bounds = self.bounds and self.bounds.eased(window.easing**_EASED_BOUNDS)
        while True:
            units = Units(
                cost.max(axis=1), cost.mean(axis=1), samples, urgent, TOLERANCE * window.easing
            )
            steps, split_tokens = self._steps_of(rows.regions, units, bounds)
            held = self._held(steps, group, groups)
            sample = self._exchanged(window, held, group != UNPLACED)
            missing = window.must[sample] & ~held
            if not missing.any():
                break
            if (group[missing] == UNPLACED).any():
                return None
            urgent = urgent.copy()
            urgent[group[missing]] = True
        placed = window.sample[held]
        work = self.weights[placed].sum()
        work += self.token_cost * self.samples.seq_len[placed].sum()
        most = np.where(steps == EMPTY, 0.0, units.most[steps]).max(axis=1, initial=0.0)
        time = float(most.sum()) * self.ranks
        efficiency = float(work) / time if time else 0.0
        return _Candidate(rows, sample, steps, split_tokens, efficiency)

    def _held(self, steps: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
        """[N] bool: which places are in steps, from the group of each or UNPLACED."""
        held = np.zeros(groups + 1, bool)
        held[steps[steps != EMPTY]] = True
        held[UNPLACED] = False
        return held[group]

    def _exchanged(self, window: Window, held: np.ndarray, in_row: np.ndarray) -> np.ndarray:
        """[N] int64: the sample of each place, so that steps hold what must be placed.

        Samples of equal tokens are exchanged, which changes no cost; chance decides among equals.

        Args:
          window: the window.
          held: [N] bool, places that are in steps.
          in_row: [N] bool, places that are in rows.
        """
        seq_len, chance = self.samples.seq_len[window.sample], self.rng.random(len(held))
        sample = np.empty(len(held), np.int64)
        places = np.lexsort((~in_row, ~held, seq_len))
        sample[places] = np.lexsort((chance, ~window.must, seq_len))
        return sample

    def _group_of(self, rows: _Rows) -> np.ndarray:
        """[N] int64: the group of each sample, or UNPLACED."""
        by_row = np.where(rows.row == UNPLACED, UNPLACED, rows.row // self.rule.context)
        return np.where(rows.row == UNPLACED, rows.regions.group, by_row)

    def _steps_of(
        self, regions: SplitRegions, units: Units, bounds: SampleBounds | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Groups of equal A and about equal cost in a step.

        Args:
          regions: of the G groups.
          units: the groups.
          bounds: on the samples of a step.

        Returns:
          [K, groups_per_step] int64, groups or EMPTY, and [K] int64, A of each step.
        """
        steps, tokens = [], []
        for size in np.unique(regions.tokens):
            same = np.flatnonzero(regions.tokens == size)
            chosen = group_into_steps(units.of(same), self.groups_per_step, bounds)
            steps.append(np.where(chosen == EMPTY, EMPTY, same[chosen]))
            tokens.append(np.full(len(chosen), size))
        return np.concatenate(steps), np.concatenate(tokens)

    def _laid_out(self, window: Window, found: _Candidate) -> tuple[PlacedSteps, np.ndarray]:
        """The steps with groups in random order, and a mask of the samples that they hold."""
        group = self._group_of(found.rows)
        steps = self.rng.permuted(found.steps, axis=1)
        place = np.full(len(found.rows.regions.tokens) + 1, UNPLACED, np.int64)
        place[steps.ravel()] = np.arange(steps.size)
        place[EMPTY] = UNPLACED
        at = np.where(group == UNPLACED, UNPLACED, place[group])
        placed = np.zeros(len(at), bool)
        placed[found.sample[at != UNPLACED]] = True
        return self._parts(window.taken(found.sample), found.rows, at, found.split_tokens), placed

    def _parts(
        self, window: Window, rows: _Rows, at: np.ndarray, split_tokens: np.ndarray
    ) -> PlacedSteps:
        """Turns (group, row) into (step, rank), and split samples into their ranks' parts."""
        context, regions, row = self.rule.context, rows.regions, rows.row
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
            late=window.late[of],
            step=step,
            rank=place_in_step * context + np.r_[row[whole] % context, member],
            tokens=np.r_[seq_len[whole], tokens],
            offset=np.r_[np.zeros(len(whole), np.int64), offset],
            is_split=np.r_[np.zeros(len(whole), bool), np.ones(len(item), bool)],
            split_tokens=split_tokens,
        )


class _Strategies:
    """Which strategies are worth trying: those that were best, or close to it."""

    def __init__(self) -> None:
        self._windows = 0
        self._found: dict[str, float] = {}

    def to_try(self, known: Sequence[str]) -> list[str]:
        """Those of the known strategies that the next window should try."""
        self._windows += 1
        if self._windows % _RETRY == 1 or not set(known) <= set(self._found):
            return list(known)
        least = max(self._found[strategy] for strategy in known) * (1 - _CLOSE)
        return [strategy for strategy in known if self._found[strategy] >= least]

    def note(self, strategy: str, efficiency: float) -> None:
        """Notes how good the strategy was in the last window that tried it."""
        self._found[strategy] = efficiency


def _growing(most: int) -> Iterator[int]:
    """Steps to add: one more at first; where much is missing, soon many more; in the end `most`."""
    more, attempt = 0, 0
    while more < most:
        yield more
        attempt += 1
        more = int(_GROWTH**attempt)
    yield most


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
