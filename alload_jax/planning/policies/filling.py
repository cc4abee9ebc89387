"""Places one window of samples after another for `balanced`: fill rows, group, lay out."""

from dataclasses import dataclass, field

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.epoch import RowShape
from alload_jax.planning.policies.grouping import (
    EMPTY,
    TOLERANCE,
    SampleBounds,
    Units,
    group_into_steps,
)
from alload_jax.planning.policies.packed import (
    PlacedSteps,
    Window,
    first_fit_decreasing,
    stable_order,
)
from alload_jax.planning.policies.splitting import (
    UNPLACED,
    Bins,
    Need,
    SplitRegions,
    SplitRule,
    assign_greedily,
    fill_split_regions,
    split_evenly,
    target_load,
)

FIRST_FIT = "first_fit_decreasing"
STRATEGIES = ("cost_per_token", FIRST_FIT, "longest_processing_time")
"""Ways to fill rows; a window takes the one whose steps take least time for their work. Only the
first splits samples and keeps an M_comp."""
_NEEDS: dict[str, Need] = {"longest_processing_time": "cost"}
ATTEMPTS = 32
"""To place an epoch's end, over its steps: if there are few, one step more would take much longer.
Every other attempt fills rows by free tokens, which more often leaves no sample over."""
_CLOSE, _RETRY = 0.02, 8
"""A strategy that was this much slower is tried again only in every eighth window."""
_SHORT_MARGIN = 1.1
"""Samples of a row of one long sample, over what the lower bound of a step asks of it."""
_GROWTH = 1.3
"""Factor by which the added steps grow while a window's steps do not hold all that must go."""
_EASED_BOUNDS = 0.2
"""Power of a window's easing by which the bounds on a step's samples widen."""


@dataclass(frozen=True)
class FilledRows:
    """Samples in rows, not yet in steps.

    Attributes:
      regions: split samples in the split regions of the G groups.
      row: [N] int64, the row of each whole sample, or UNPLACED.
      load: [B] float64, cost of each row's samples and communication.
      group: [N] int64, the group of each sample, or UNPLACED.
    """

    regions: SplitRegions
    row: np.ndarray
    load: np.ndarray
    group: np.ndarray


@dataclass(frozen=True)
class _Candidate:
    """Steps made by one strategy.

    Attributes:
      rows: positions of the window's samples in rows.
      steps: [K, groups_per_step] int64, groups of rows, or EMPTY.
      split_tokens: [K] int64, A of each step.
      efficiency: work of the samples in the steps over the ranks' time; at most 1.
    """

    rows: FilledRows
    steps: np.ndarray
    split_tokens: np.ndarray
    efficiency: float


@dataclass
class WindowPlanner:
    """Places one window after another.

    Attributes:
      seq_len: [N] int64, tokens of each sample that windows may hold.
      shape: of the rows.
      rule: which samples are split.
      weights: [N], what each of these samples costs beyond padding of its length.
      empty_cost: cost of a row of padding.
      token_cost: what a token of padding costs.
      max_load: most weight of a row that holds more than one sample; None without M_comp.
      bounds: on the samples of a step; None for none.
      ranks: data-parallel ranks.
      step_tokens: that a step holds on average.
      steps: of a window.
      rng: generator of the choice among rows and of the order of groups within a step.
      attempts: most times that an epoch's end is placed, of which the fastest is taken.
    """

    seq_len: np.ndarray
    shape: RowShape
    rule: SplitRule
    weights: np.ndarray
    empty_cost: float
    token_cost: float
    max_load: float | None
    bounds: SampleBounds | None
    ranks: int
    step_tokens: float
    steps: int
    rng: np.random.Generator
    attempts: int = ATTEMPTS
    _windows: int = 0
    _efficiency: dict[str, float] = field(default_factory=dict)

    @property
    def groups_per_step(self) -> int:
        """Context-parallel groups."""
        return self.ranks // self.rule.context

    @property
    def window_tokens(self) -> float:
        """Tokens of a window, deferred samples included."""
        return self.steps * self.step_tokens

    def place(self, window: Window) -> tuple[PlacedSteps, np.ndarray]:
        """The steps, and a mask of the samples that they hold."""
        candidates = {each: self._candidate(window, each) for each in self._strategies(window)}
        self._efficiency |= {name: each.efficiency for name, each in candidates.items()}
        found = max(candidates.values(), key=lambda each: each.efficiency)
        # Groups of a step get ranks in random order.
        steps = self.rng.permuted(found.steps, axis=1)
        at = _positions(steps, len(found.rows.regions.tokens))[found.rows.group]
        # Samples of equal tokens are exchanged, which changes no cost, for new company.
        seq_len = self.seq_len[window.sample]
        shuffled, by_length = self.rng.permutation(len(at)), np.argsort(seq_len, kind="stable")
        length = np.zeros(len(at), np.int64)
        length[by_length[1:]] = np.cumsum(np.diff(seq_len[by_length]) > 0)
        sample = np.empty(len(at), np.int64)
        sample[by_length] = shuffled[stable_order(length[shuffled])]
        placed = np.zeros(len(at), bool)
        placed[sample[at != UNPLACED]] = True
        window, seq_len = window.taken(sample), seq_len[sample]
        # (group, row) become (step, rank), and split samples their ranks' parts.
        context, regions, row = self.rule.context, found.rows.regions, found.rows.row
        whole = np.flatnonzero((at != UNPLACED) & (row != UNPLACED))
        split = np.flatnonzero((at != UNPLACED) & (row == UNPLACED))
        split = split[np.argsort(regions.group[split], kind="stable")]
        group = regions.group[split]
        item, member, offset, tokens = split_evenly(
            _starts(group, window.footprint[split]), seq_len[split], regions.tokens[group], context
        )
        of = np.r_[whole, split[item]]
        step, place_in_step = np.divmod(at[of], self.groups_per_step)
        steps_of_window = PlacedSteps(
            sample=window.sample[of],
            step=step,
            rank=place_in_step * context + np.r_[row[whole] % context, member],
            tokens=np.r_[seq_len[whole], tokens],
            offset=np.r_[np.zeros(len(whole), np.int64), offset],
            is_split=np.r_[np.zeros(len(whole), bool), np.ones(len(item), bool)],
            split_tokens=found.split_tokens,
        )
        return steps_of_window, placed

    def _strategies(self, window: Window) -> list[str]:
        """The strategies to try: those that keep to what rows must and were best or close to it."""
        any_row = self.rule.context == 1 and self.max_load is None
        known: tuple[str, ...] = STRATEGIES if any_row else STRATEGIES[:1]
        if window.is_last:  # first-fit would give the one window of a small epoch its rows again
            known = tuple(each for each in known if each != FIRST_FIT) or known
        self._windows += 1
        if self._windows % _RETRY == 1 or not set(known) <= set(self._efficiency):
            return list(known)
        least = max(self._efficiency[each] for each in known) * (1 - _CLOSE)
        return [each for each in known if self._efficiency[each] >= least]

    def _candidate(self, window: Window, strategy: str) -> _Candidate:
        """The steps of one strategy, which hold all samples of the last window."""
        wanted = float(window.footprint.sum()) / self.step_tokens
        if not window.is_last:
            steps = max(1, min(self.steps, round(wanted)))
            return self._grouped(window, self._filled(window, strategy, steps))
        # One step more at first; where much is missing, soon many more. Even with a row for each
        # sample, more steps than samples would not help.
        more, growth, most = 0, 0, len(window.sample)
        while True:
            steps = int(np.ceil(wanted)) + more
            found: list[_Candidate] = []
            for attempt in range(max(1, min(self.attempts, ATTEMPTS // steps))):
                rows = self._filled(window, strategy, steps, "free_tokens" if attempt % 2 else None)
                missing = rows.group == UNPLACED
                if not missing.any():
                    found.append(self._grouped(window, rows))
            if found:
                return max(found, key=lambda each: each.efficiency)
            if more == most:
                break
            growth += 1
            more = min(most, int(_GROWTH**growth))
        raise InputError(
            f"policy balanced: no row has room for a sample of {window.footprint[missing].max()} "
            "tokens; raise planning.m_mem or planning.m_comp"
        )

    def _filled(
        self, window: Window, strategy: str, steps: int, need: Need | None = None
    ) -> FilledRows:
        """Samples to groups' split regions, the others to ranks' rows, by the strategy's need."""
        context, weight = self.rule.context, self.weights[window.sample]
        if strategy == FIRST_FIT:  # without regard to the cost of rows
            row, rows = first_fit_decreasing(window.footprint, self.shape)
            none = np.zeros(rows, np.int64)
            regions = SplitRegions(np.full(len(row), UNPLACED), none, none.astype(np.float64))
            return FilledRows(regions, row, np.bincount(row, weights=weight, minlength=rows), row)
        max_load = np.inf if self.max_load is None else self.max_load
        per_step = self.groups_per_step
        regions = fill_split_regions(
            self.rule, window.footprint, weight, steps * per_step, per_step, max_load
        )
        whole = (regions.group == UNPLACED) & ~self.rule.applies(window.footprint)
        region_tokens = np.repeat(regions.tokens, context)
        bins = Bins(
            free=self.shape.capacity - region_tokens,
            load=np.repeat(regions.load / context, context)
            + self.shape.seconds_per_split_token * region_tokens,
            free_slots=np.full(len(region_tokens), self.shape.segments),
            max_load=max_load,
        )
        need = need or _NEEDS.get(strategy, "cost_per_token")
        row = self._assign_whole(window, weight, whole, bins, need)
        load = bins.load
        if context > 1 and self.max_load is None:  # else a row that moves may come to cost more
            # Rows of about equal cost come into a group, the costlier ones where split samples
            # weigh less. Any row may move to any group of the same A.
            split = np.repeat(regions.load / context, context)
            whole_load, moved_to = load - split, np.empty(len(load), np.int64)
            moved_to[np.lexsort((-whole_load, region_tokens))] = np.lexsort((split, region_tokens))
            load = np.empty_like(load)
            load[moved_to] = whole_load
            load += split
            row = np.where(row == UNPLACED, UNPLACED, moved_to[row])
        group = np.where(row == UNPLACED, regions.group, row // context)
        return FilledRows(regions, row, load, group)

    def _assign_whole(
        self, window: Window, weight: np.ndarray, whole: np.ndarray, bins: Bins, need: Need
    ) -> np.ndarray:
        """The row of each sample that is not split, or UNPLACED: [N] int64."""
        row = np.full(len(window.sample), UNPLACED, np.int64)

        def assign(mask: np.ndarray) -> None:
            target = target_load(weight[mask], len(bins.free), float(bins.load.sum()))
            row[mask] = assign_greedily(
                window.footprint[mask], weight[mask], bins, target, self.rng, need
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

    def _grouped(self, window: Window, rows: FilledRows) -> _Candidate:
        """Steps of groups that cost the same, or of all groups of the last window."""
        groups = len(rows.regions.tokens)
        cost = self.empty_cost + rows.load.reshape(groups, self.rule.context)
        samples = np.bincount(rows.group[rows.group != UNPLACED], minlength=groups)
        bounds = self.bounds and self.bounds.eased(window.easing**_EASED_BOUNDS)
        most, mean = cost.max(axis=1), cost.mean(axis=1)
        tolerance = TOLERANCE * window.easing
        of_size, tokens = [], []
        for size in np.unique(rows.regions.tokens):  # groups of a step have equal A
            same = np.flatnonzero(rows.regions.tokens == size)
            per_step = self.groups_per_step
            units = Units(most[same], mean[same], samples[same], tolerance)
            chosen = group_into_steps(units, per_step, bounds, window.is_last)
            of_size.append(np.where(chosen == EMPTY, EMPTY, same[chosen]))
            tokens.append(np.full(len(chosen), size))
        steps, split_tokens = np.concatenate(of_size), np.concatenate(tokens)
        placed = window.sample[_positions(steps, groups)[rows.group] != UNPLACED]
        work = self.weights[placed].sum()
        work += self.token_cost * self.seq_len[placed].sum()
        makespan = np.where(steps == EMPTY, 0.0, most[steps]).max(axis=1, initial=0.0)
        time = float(makespan.sum()) * self.ranks
        return _Candidate(rows, steps, split_tokens, float(work) / time if time else 0.0)


def _positions(steps: np.ndarray, groups: int) -> np.ndarray:
    """[groups + 1] int64: where each group stands in the steps, or UNPLACED, as the last one."""
    position = np.full(groups + 1, UNPLACED, np.int64)
    position[steps.ravel()] = np.arange(steps.size)
    position[EMPTY] = UNPLACED
    return position


def _starts(group: np.ndarray, footprint: np.ndarray) -> np.ndarray:
    """[N]: where each sample begins in its group's split tokens; samples are sorted by group."""
    before = np.cumsum(footprint) - footprint
    opens = np.diff(group, prepend=-1) != 0
    return before - np.maximum.accumulate(np.where(opens, before, 0))
