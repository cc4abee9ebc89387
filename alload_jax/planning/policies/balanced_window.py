"""Places one window of samples after another for `balanced`: fill, group, lay out."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.policies.greedy import UNPLACED
from alload_jax.planning.policies.grouping import (
    EMPTY,
    TOLERANCE,
    SampleBounds,
    Units,
    group_into_steps,
)
from alload_jax.planning.policies.packed import PlacedSteps
from alload_jax.planning.policies.queue import Window
from alload_jax.planning.policies.row_filling import FIRST_FIT, FilledRows, RowFiller
from alload_jax.planning.policies.splitting import SplitRegions, split_evenly
from alload_jax.planning.policies.strategy_choice import StrategyChoice
from alload_jax.planning.samples import Samples

_GROWTH = 1.3
"""Factor by which the added steps grow while a window's steps do not hold all that must go."""

_EASED_BOUNDS = 0.2
"""Power of a window's easing by which the bounds on a step's samples widen."""


@dataclass(frozen=True)
class _Candidate:
    """Steps made by one strategy.

    Attributes:
      rows: places for the window's samples in rows.
      steps: [K, groups_per_step] int64, groups of rows, or EMPTY.
      split_tokens: [K] int64, A of each step.
      efficiency: work of the samples in the steps over the ranks' time; at most 1.
    """

    rows: FilledRows
    steps: np.ndarray
    split_tokens: np.ndarray
    efficiency: float


@dataclass(frozen=True)
class WindowPlanner:
    """Places one window after another.

    Attributes:
      filler: fills rows; its generator also decides the order of groups within a step.
      token_cost: what a token of padding costs.
      samples: the manifest's.
      steps: of a window.
    """

    filler: RowFiller
    token_cost: float
    samples: Samples
    steps: int
    _strategies: StrategyChoice = field(default_factory=StrategyChoice)

    def place(self, window: Window) -> tuple[PlacedSteps, np.ndarray]:
        """The steps, and a mask of the samples that they hold."""
        best: _Candidate | None = None
        known = self.filler.strategies
        if window.is_last:  # first-fit would give the one window of a small epoch its rows again
            known = tuple(each for each in known if each != FIRST_FIT) or known
        for strategy in self._strategies.to_try(known):
            found = self._candidate(window, strategy)
            self._strategies.note(strategy, found.efficiency)
            if best is None or found.efficiency > best.efficiency:
                best = found
        assert best is not None
        return self._laid_out(window, best)

    def _candidate(self, window: Window, strategy: str) -> _Candidate:
        """The steps of one strategy, which hold all samples of the last window."""
        wanted = float(window.footprint.sum()) / self.filler.step_tokens
        if not window.is_last:
            steps = max(1, min(self.steps, round(wanted)))
            return self._grouped(window, self.filler.fill(window, strategy, steps))
        # Even with a row for each sample, more steps than samples would not help.
        for more in _growing(len(window.sample)):
            rows = self.filler.fill(window, strategy, int(np.ceil(wanted)) + more)
            missing = self._group_of(rows) == UNPLACED
            if not missing.any():
                return self._grouped(window, rows)
        raise InputError(
            f"policy balanced: no row has room for a sample of {window.footprint[missing].max()} "
            "tokens; raise planning.m_mem or planning.m_comp"
        )

    def _grouped(self, window: Window, rows: FilledRows) -> _Candidate:
        """Steps of groups that cost the same, or of all groups of the last window."""
        group = self._group_of(rows)
        groups = len(rows.regions.tokens)
        cost = self.filler.costs.empty + rows.load.reshape(groups, self.filler.rule.context)
        samples = np.bincount(group[group != UNPLACED], minlength=groups)
        bounds = self.filler.bounds and self.filler.bounds.eased(window.easing**_EASED_BOUNDS)
        units = Units(cost.max(axis=1), cost.mean(axis=1), samples, TOLERANCE * window.easing)
        steps, split_tokens = self._steps_of(rows.regions, units, bounds, window.is_last)
        placed = window.sample[self._held(steps, group, groups)]
        work = self.filler.weights[placed].sum()
        work += self.token_cost * self.samples.seq_len[placed].sum()
        most = np.where(steps == EMPTY, 0.0, units.most[steps]).max(axis=1, initial=0.0)
        time = float(most.sum()) * self.filler.ranks
        return _Candidate(rows, steps, split_tokens, float(work) / time if time else 0.0)

    def _held(self, steps: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
        """[N] bool: which places are in steps, from the group of each or UNPLACED."""
        held = np.zeros(groups + 1, bool)
        held[steps[steps != EMPTY]] = True
        held[UNPLACED] = False
        return held[group]

    def _group_of(self, rows: FilledRows) -> np.ndarray:
        """[N] int64: the group of each sample, or UNPLACED."""
        by_row = np.where(rows.row == UNPLACED, UNPLACED, rows.row // self.filler.rule.context)
        return np.where(rows.row == UNPLACED, rows.regions.group, by_row)

    def _steps_of(
        self, regions: SplitRegions, units: Units, bounds: SampleBounds | None, place_all: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Groups of equal A and about equal cost in a step.

        Args:
          regions: of the G groups.
          units: the groups.
          bounds: on the samples of a step.
          place_all: see `group_into_steps`.

        Returns:
          [K, groups_per_step] int64, groups or EMPTY, and [K] int64, A of each step.
        """
        steps, tokens = [], []
        for size in np.unique(regions.tokens):
            same = np.flatnonzero(regions.tokens == size)
            per_step = self.filler.groups_per_step
            chosen = group_into_steps(units.of(same), per_step, bounds, place_all)
            steps.append(np.where(chosen == EMPTY, EMPTY, same[chosen]))
            tokens.append(np.full(len(chosen), size))
        return np.concatenate(steps), np.concatenate(tokens)

    def _laid_out(self, window: Window, found: _Candidate) -> tuple[PlacedSteps, np.ndarray]:
        """The steps with groups in random order, and a mask of the samples that they hold."""
        group = self._group_of(found.rows)
        steps = self.filler.rng.permuted(found.steps, axis=1)
        place = np.full(len(found.rows.regions.tokens) + 1, UNPLACED, np.int64)
        place[steps.ravel()] = np.arange(steps.size)
        place[EMPTY] = UNPLACED
        at = np.where(group == UNPLACED, UNPLACED, place[group])
        # Samples of equal tokens are exchanged, which changes no cost, for new company.
        sample = _shuffled_among_equals(self.samples.seq_len[window.sample], self.filler.rng)
        placed = np.zeros(len(at), bool)
        placed[sample[at != UNPLACED]] = True
        return self._parts(window.taken(sample), found.rows, at, found.split_tokens), placed

    def _parts(
        self, window: Window, rows: FilledRows, at: np.ndarray, split_tokens: np.ndarray
    ) -> PlacedSteps:
        """Turns (group, row) into (step, rank), and split samples into their ranks' parts."""
        context, regions, row = self.filler.rule.context, rows.regions, rows.row
        seq_len = self.samples.seq_len[window.sample]
        whole = np.flatnonzero((at != UNPLACED) & (row != UNPLACED))
        split = np.flatnonzero((at != UNPLACED) & (row == UNPLACED))
        split = split[np.argsort(regions.group[split], kind="stable")]
        group = regions.group[split]
        item, member, offset, tokens = split_evenly(
            _starts(group, window.footprint[split]), seq_len[split], regions.tokens[group], context
        )
        of = np.r_[whole, split[item]]
        step, place_in_step = np.divmod(at[of], self.filler.groups_per_step)
        return PlacedSteps(
            sample=window.sample[of],
            step=step,
            rank=place_in_step * context + np.r_[row[whole] % context, member],
            tokens=np.r_[seq_len[whole], tokens],
            offset=np.r_[np.zeros(len(whole), np.int64), offset],
            is_split=np.r_[np.zeros(len(whole), bool), np.ones(len(item), bool)],
            split_tokens=split_tokens,
        )


def _growing(most: int) -> Iterator[int]:
    """Steps to add: one more at first; where much is missing, soon many more; in the end `most`."""
    more, attempt = 0, 0
    while more < most:
        yield more
        attempt += 1
        more = int(_GROWTH**attempt)
    yield most


def _shuffled_among_equals(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[N] int64: a random permutation that exchanges equal values alone."""
    shuffled = rng.permutation(len(values))
    found = np.empty(len(values), np.int64)
    found[np.argsort(values, kind="stable")] = shuffled[np.argsort(values[shuffled], kind="stable")]
    return found


def _starts(group: np.ndarray, footprint: np.ndarray) -> np.ndarray:
    """[N]: where each sample begins in its group's split tokens; samples are sorted by group."""
    before = np.cumsum(footprint) - footprint
    opens = np.r_[True, group[1:] != group[:-1]] if len(group) else np.zeros(0, bool)
    return before - np.maximum.accumulate(np.where(opens, before, 0))
