"""Packed rows that are full and cost the same on every rank of a step."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from typing_extensions import override

from alload_jax.errors import InputError, require_fields, require_positive
from alload_jax.planning.cost import CostFile, CostModel, empty_row_cost, marginal_cost
from alload_jax.planning.epoch import EpochPlan, RowShape
from alload_jax.planning.policies.filling import ATTEMPTS, WindowPlanner
from alload_jax.planning.policies.grouping import SampleBounds
from alload_jax.planning.policies.packed import (
    SLOTS_UNIT,
    PackedSettings,
    packed_epoch,
    place_windows,
    refuse_unplaceable,
    row_shape,
    slots_for,
)
from alload_jax.planning.policies.policy import (
    MOST,
    Policy,
    RankTopology,
    makespan,
    time_to_loss,
)
from alload_jax.planning.policies.splitting import SplitRule, allowed_split_sizes
from alload_jax.planning.samples import Samples

_FEWEST_SAMPLES = 8192
"""Minimum samples of a window: with fewer, rows of equal cost are hard to find."""

_SLOT_FACTOR = 2.5
"""Rows mix long and short samples, so that few hold many more than the mean."""

MOST_PRICE = 0.03
"""Share of the time that the bound on a step's samples may cost."""
_WIDER, _WIDENINGS = 1.15, 32
"""Factor between the bounds that are tried, and their number."""
_TIGHTER = (0.5, 0.25)
"""Of the bound's part beyond 1, what tighter ones have."""

_EXTRA_SAMPLES = 4
"""Short samples that a group's split regions hold beside as many split samples as fit."""
_WINDOWS_FOR_SPLIT_SIZES = 8
"""From which the values of A are chosen: split samples are few, and vary from window to window."""


@dataclass(frozen=True)
class BalancedSettings(PackedSettings):
    """The settings of `Balanced`.

    Attributes:
      row_tokens: tokens of a packed row of `balanced`, at most m_mem; null for the number with the
        least predicted time.
      sample_spread: a step of `balanced` holds at most this many times the mean number of samples,
        and at least the mean over it, so that each sample weighs about the same; null for no bound.
      split_above: samples whose cost exceeds this many times that of a mean row are split: 1 is
        the fair share, 0 splits all.
    """

    row_tokens: int | None = None
    sample_spread: float | None = 2.5
    split_above: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("planning.", self, "row_tokens", most=MOST)
        spread = "above 1, and null sets no bound"
        require_fields("planning.", self, "sample_spread", lambda value: value > 1, spread)
        above = "0 or more, and finite"
        require_fields("planning.", self, "split_above", lambda value: 0 <= value < math.inf, above)


@dataclass(frozen=True)
class Balanced(Policy):
    """Fills rows to M_mem tokens at most, and groups rows of equal predicted cost into steps.

    A greedy assignment gives the samples of a window to all rows of its steps at once (`greedy`).
    It evens out both tokens and cost as far as the samples allow. First-fit decreasing and longest
    processing time fill the same window, and the steps with the least time for their work are taken
    (`filling`). Rows that still cost more than others, because they hold a long sample, are
    deferred to a later window until there is one for every rank (`grouping`), as long documents are
    in WLB-LLM (arXiv 2503.17924). With a context-parallel group, samples that cost more than a
    rank's fair share are split instead (`splitting`), as in Zellige (arXiv 2608.01150).

    Attributes:
      m_mem: most tokens of a row.
      cost: the cost model.
      m_comp: maximum cost of a row with more than one sample; None for no bound.
      align, sample_spread, look_ahead, split_above: see `BalancedSettings`.
      noise_scale: see `PlanSettings`.
      row_tokens: T, tokens of a row; None for M_mem.
      max_segments: M, most whole samples of a row, and most split samples of a group (of each
        of its ranks, where all is split); None for 2.5 times the mean.
      context: ranks of a context-parallel group; 1 splits nothing.
      seconds_per_split_token: of communication, for each of the A tokens of a rank that are split.
      refitted: the cost model that balances rows, where step times have corrected `cost`. What is
        compiled for rows, such as the sizes of split regions, always follows from `cost`.
    """

    name: ClassVar[str] = "balanced"
    packed: ClassVar[bool] = True
    splits_samples: ClassVar[bool] = True
    has_m_comp: ClassVar[bool] = True
    recalibrates: ClassVar[tuple[str, ...]] = ("epoch", "window")

    m_mem: int
    cost: CostModel
    m_comp: float | None = None
    align: int = 1
    max_segments: int | None = None
    row_tokens: int | None = None
    sample_spread: float | None = 2.5
    look_ahead: int = 32
    context: int = 1
    seconds_per_split_token: float = 0.0
    split_above: float = 1.0
    refitted: CostModel | None = None
    noise_scale: float | None = None

    @classmethod
    @override
    def from_config(cls, config: BalancedSettings, costs: CostFile) -> Self:
        m_mem = config.required_m_mem(costs)
        if config.row_tokens is not None and config.row_tokens > m_mem:
            raise InputError(
                f"planning.row_tokens is {config.row_tokens}, more than m_mem = {m_mem} tokens; "
                "make it smaller, or leave it out"
            )
        return cls(
            m_mem=m_mem,
            cost=config.predictor(costs),
            m_comp=config.m_comp_value,
            align=config.align,
            max_segments=config.max_segments,
            row_tokens=config.row_tokens,
            sample_spread=config.sample_spread,
            look_ahead=config.look_ahead,
            context=config.context_value,
            seconds_per_split_token=config.seconds_per_split_token(costs),
            split_above=config.split_above,
            noise_scale=config.noise_scale,
        )

    def fitted(
        self, samples: Samples, topology: RankTopology, program_share: float = 0.0
    ) -> "Balanced":
        """The row with the least predicted time, of as many tokens as M_mem or fewer.

        Where the bound on a step's samples costs more than `MOST_PRICE` of time, it is the tightest
        that does not. With a noise scale, time is that to a loss, and so is the bound chosen, among
        tighter ones and none.
        """
        del program_share  # rows of one size are one program
        trials = RowTrials(self, samples, topology)
        tokens = self.row_tokens or trials.best_tokens()[0]
        slots = self.max_segments or trials.best_slots(tokens)
        fitted, spread = replace(self, row_tokens=tokens, max_segments=slots), self.sample_spread
        if spread is None or spread == np.inf:
            return replace(fitted, sample_spread=None)
        if self.noise_scale is not None:
            bounds = (spread, *(1 + (spread - 1) * share for share in _TIGHTER), None)
            tried = [replace(fitted, sample_spread=bound) for bound in bounds]
            return min(tried, key=trials.time_of)
        most = (1 + MOST_PRICE) * trials.time_of(replace(fitted, sample_spread=None))

        def affordable(spread: float) -> bool:
            return trials.time_of(replace(fitted, sample_spread=spread)) <= most

        if affordable(spread):
            return fitted
        wider = [round(spread * _WIDER**n, 2) for n in range(1, _WIDENINGS)]
        at = bisect_left(wider, True, key=affordable)
        return replace(fitted, sample_spread=wider[at] if at < len(wider) else None)

    @override
    def recalibrated(self, cost: CostModel) -> "Balanced":
        return replace(self, refitted=cost)

    @override
    def plan_epoch(
        self,
        samples: Samples,
        topology: RankTopology,
        rng: np.random.Generator,
        attempts: int = ATTEMPTS,
    ) -> EpochPlan:
        """See `Policy.plan_epoch`; for `attempts`, `WindowPlanner`."""
        planner = replace(self.window_planner(samples, topology, rng), attempts=attempts)
        footprint = planner.shape.footprint(samples.seq_len)
        order = samples.shuffled(rng)
        windows = place_windows(order, footprint, planner.window_tokens, planner.place)
        return packed_epoch(windows, planner.shape, topology, samples.seq_len, rng)

    def window_planner(
        self, samples: Samples, topology: RankTopology, rng: np.random.Generator
    ) -> WindowPlanner:
        """What places windows of the samples, in rows and steps that follow from all of them.

        Raises:
          InputError: the policy cannot place a sample.
        """
        if topology.ranks % self.context:
            raise InputError(
                f"planning.context is {self.context}, which does not divide {topology.ranks} "
                "ranks; choose a divisor"
            )
        setting = "row_tokens" if self.capacity < self.m_mem else "m_mem"
        typical = samples.typical()
        shape = row_shape(
            typical, self.capacity, self.max_segments, self.align, _SLOT_FACTOR, setting
        )
        refuse_unplaceable(samples, shape, self, topology.ranks, self.context, setting)
        footprint = shape.footprint(samples.seq_len)
        weights = marginal_cost(self._model, samples.seq_len)
        held, held_weights = footprint, weights
        if typical is not samples:
            held = shape.footprint(typical.seq_len)
            held_weights = marginal_cost(self._model, typical.seq_len)
        rule = self._rule(typical.seq_len, held, topology.ranks, shape)
        shape = replace(
            shape,
            context=self.context,
            split_sizes=tuple(rule.split_sizes.tolist()),
            region_segments=rule.segments,
            longest_whole=int(samples.seq_len[~rule.applies(footprint)].max(initial=1)),
            seconds_per_split_token=self.seconds_per_split_token,
        )
        mean_row_tokens = self._mean_row_tokens(shape, held, held_weights)
        step_tokens = topology.ranks * mean_row_tokens
        bounds, spread = None, self.sample_spread
        if spread is not None and spread != np.inf:
            mean = step_tokens / float(held.mean())
            bounds = SampleBounds(mean / spread, mean, mean * spread)
        return WindowPlanner(
            seq_len=samples.seq_len,
            shape=shape,
            rule=rule,
            weights=weights,
            empty_cost=self._empty_row_cost(shape.segments),
            token_cost=float(self._model.padding_cost(np.asarray(self.capacity))) / self.capacity,
            max_load=self._max_load(shape),
            bounds=bounds,
            ranks=topology.ranks,
            step_tokens=step_tokens,
            steps=self._window_steps(held, step_tokens),
            rng=rng,
        )

    def m_comp_measure(self, seq_len: np.ndarray) -> np.ndarray:
        """Cost of a row that holds one sample; see `Policy.m_comp_measure`."""
        return self._empty_row_cost(self.max_segments or 0) + marginal_cost(self._model, seq_len)

    @property
    def _model(self) -> CostModel:
        """The cost model that balances rows."""
        return self.refitted or self.cost

    @property
    def capacity(self) -> int:
        """T."""
        return self.row_tokens or self.m_mem

    def _empty_row_cost(self, slots: int) -> float:
        """The cost of a row of padding."""
        return float(empty_row_cost(self._model, np.asarray(self.capacity), np.asarray(slots)))

    def _max_load(self, shape: RowShape) -> float | None:
        """What M_comp leaves a row for the weights of its samples; None without M_comp."""
        if self.m_comp is None:
            return None
        return max(0.0, self.m_comp - self._empty_row_cost(shape.segments))

    def _mean_row_tokens(
        self, shape: RowShape, footprint: np.ndarray, weights: np.ndarray
    ) -> float:
        """Tokens that a row will hold on average: M_comp or M may bind before M_mem does."""
        mean, density = footprint.mean(), weights.sum() / footprint.sum()
        max_load = self._max_load(shape)
        by_load = np.inf if max_load is None or not density else max_load / density
        # Where even one sample is over M_comp, a row holds one.
        return float(max(mean, min(shape.capacity, by_load, shape.segments * mean)))

    def _window_steps(self, footprint: np.ndarray, step_tokens: float) -> int:
        """Steps of a window: the look-ahead, or more to hold enough samples; at most an epoch's."""
        per_step = max(1.0, step_tokens / float(footprint.mean()))
        epoch = int(np.ceil(footprint.sum() / step_tokens))
        return max(1, min(epoch, max(self.look_ahead, int(np.ceil(_FEWEST_SAMPLES / per_step)))))

    def _rule(
        self, seq_len: np.ndarray, footprint: np.ndarray, ranks: int, shape: RowShape
    ) -> SplitRule:
        """Decided from windows that depend on the manifest alone: epochs share programs."""
        segments, capacity = shape.segments, shape.capacity
        if not self.split_above:  # a group's samples are those of all its rows
            segments *= self.context
        rule = SplitRule(self.context, capacity, capacity, np.zeros(1, np.int64), segments)
        if self.context == 1:
            return rule
        if self.refitted:
            return replace(self, refitted=None)._rule(seq_len, footprint, ranks, shape)
        weights = marginal_cost(self._model, seq_len)
        share = self.split_above * float(weights.sum() / footprint.sum() * capacity)
        heavy = footprint[weights > share]
        longest_whole = min(capacity, int(heavy.min(initial=capacity + 1)) - 1)
        rule = replace(rule, longest_whole=longest_whole)
        steps = self._window_steps(
            footprint, ranks * self._mean_row_tokens(shape, footprint, weights)
        )
        epoch = -(-int(footprint.sum()) // (ranks * capacity))
        steps = max(1, min(epoch, _WINDOWS_FOR_SPLIT_SIZES * steps))
        # The longest sample is that of most tokens: with alignment, others may have its footprint.
        drawn = np.random.default_rng(0).permutation(len(footprint))
        upto = int(np.searchsorted(np.cumsum(footprint[drawn]), steps * ranks * capacity))
        drawn = np.r_[drawn[: max(1, upto)], np.argmax(seq_len)]
        drawn = drawn[np.argsort(-seq_len[drawn], kind="stable")]
        per_step = ranks // self.context
        split_sizes = allowed_split_sizes(
            footprint[drawn],
            weights[drawn],
            rule,
            steps * per_step,
            per_step,
            self.align,
        )
        rule = replace(rule, split_sizes=split_sizes)
        split = rule.applies(footprint)
        if not split.any():
            return rule
        # Slots that split regions have use for: each costs every rank memory.
        fit = self.context * int(split_sizes[-1]) // int(footprint[split].min())
        return replace(rule, segments=min(segments, fit + _EXTRA_SAMPLES))


_EPOCHS, _TRIAL_ATTEMPTS = 4, 2
"""Epochs of few samples that are planned with each row, and attempts at their ends: fewer than a
plan makes, which so succeeds in all epochs, and not by chance in the first alone."""
_MOST_SEARCHED, _FEWEST_RANKS = 4_000, 8
"""Samples of the epochs that are tried, and ranks to which those of a larger data set shrink."""
_STEP, _COARSE = 1.01, 8
"""Ratio of neighbours among the T that may be tried; every eighth is tried first."""
TRIALS = 24
"""Epochs that are planned before the search goes on around the best T alone."""
_COMMON_LENGTHS = 6
_SLOT_FACTORS_TRIED = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Slots that are tried, over the mean number of samples of a row."""
_AMPLE = 4.0
"""Slots while tokens are chosen, over that mean."""
_FEWEST_UNITS = 256
"""T is a multiple of a power of two, at least so many times, unless that costs more."""
_ALIGNED = 8
"""Tokens of which matrix products take multiples without copies."""
_ODD_PRICE = 1.2
"""Time with other rows, over that predicted: matrix products copy operands, and attention within
rows that do not divide into windows takes longer. A tenth each, in one profile of an H200."""
_LEAST = 1e-200
"""Of a divisor: with costs of samples alone an empty row costs nothing."""
_WORTH_OF_SLOTS = 0.003
"""Share of the time that more slots must save."""


class RowTrials:
    """Plans epochs with rows of several sizes.

    Of many samples it draws few, for fewer ranks: samples per rank decide on the steps.

    The time over T, the tokens of a row, is a saw: with fewer tokens the same steps hold less
    padding, until one step more is needed. Lengths that do not add up to T leave padding too. So
    epochs are planned at many T, the most promising first, until a lower bound on the time of all
    others is above the best. Slots for samples are computed too, and too few of them leave rows of
    short samples unfilled.

    Attributes:
      policy: what fills the rows.
      samples: of the epochs.
      topology: ranks of the epochs.
    """

    def __init__(self, policy: Balanced, samples: Samples, topology: RankTopology):
        """Draws the samples of the epochs from those of a typical one."""
        context, ranks_planned = policy.context, topology.ranks
        factor = len(samples) / _MOST_SEARCHED
        if factor > 1:
            least = min(topology.ranks, max(context, _FEWEST_RANKS // context * context))
            ranks = max(least, round(topology.ranks / factor / context) * context)
            count = max(_MOST_SEARCHED, round(len(samples) * ranks / topology.ranks))
            # Evenly over the lengths, the longest among them.
            order = np.argsort(samples.seq_len, kind="stable")
            count = min(count, _MOST_SEARCHED * 4, len(samples))
            drawn = order[np.linspace(0, len(order) - 1, count).astype(np.int64)]
            samples = Samples(samples.shape[drawn], samples.seq_len[drawn])
            topology = RankTopology(ranks, micro_batches_per_step=topology.micro_batches_per_step)
        # Steps of fewer ranks hold fewer samples.
        scale = policy.noise_scale
        self._noise = None if scale is None else scale * topology.ranks / ranks_planned
        self.policy, self.samples, self.topology = policy, samples, topology
        self._epochs = max(1, min(_EPOCHS, _MOST_SEARCHED // len(samples)))
        # Time of all ranks for a token, for each unit of time of an epoch.
        self._per_token = topology.ranks / float(samples.seq_len.sum())

    def time(self, tokens: int, slots: int, most: float = np.inf) -> float:
        """`time_of` rows of so many tokens and slots."""
        slots = self.policy.max_segments or slots
        return self.time_of(replace(self.policy, row_tokens=tokens, max_segments=slots), most)

    def time_of(self, policy: Balanced, most: float = np.inf) -> float:
        """Predicted time of all ranks for a token, in epochs until their mean is over `most`.

        With a noise scale it is `time_to_loss`.
        """
        total, mean, attempts = 0.0, 0.0, min(_TRIAL_ATTEMPTS, self._epochs)
        for epoch in range(self._epochs):
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, epoch])))
            plan = policy.plan_epoch(self.samples, self.topology, rng, attempts)
            if self._noise is None:
                total += self._per_token * makespan(plan, policy.cost)
            else:
                total += time_to_loss(plan, policy.cost, self._noise)
            mean = total / (epoch + 1)
            if mean > most:
                break
        return mean

    def best_tokens(self, below: float = np.inf, trials: int = TRIALS) -> tuple[int, float]:
        """T with the least `time` times its price, up to the policy's M_mem, and that product.

        The smallest that is tried is the longest sample, or its share where it is split. If the
        longest does not fit, T is M_mem. Where the policy says T, that is taken.

        Args:
          below: a time that is known of other rows; what cannot be faster is not tried.
          trials: epochs that are planned before the search goes on around the best T alone.
        """
        align, most = self.policy.align, self.policy.capacity
        footprint = np.sort(-(-self.samples.seq_len // align) * align)[::-1]
        longest = -(-int(footprint[0]) // (self.policy.context * align)) * align
        if longest > most:  # the plan refuses it
            return most, np.inf
        values = np.asarray([most])
        if self.policy.row_tokens is None:
            values = self._candidates(footprint, longest, most)
        bound = self._lower_bounds(values, footprint)
        odd = (values % _units(values) > 0) & (values % _ALIGNED > 0)
        times, price = np.full(len(values), np.inf), np.where(odd, _ODD_PRICE, 1.0)
        bound *= price

        def try_out(places: Iterable[int], trials: int) -> None:
            for place in sorted(places, key=lambda place: float(bound[place])):
                if trials and np.isinf(times[place]) and bound[place] < min(below, times.min()):
                    slots = slots_for(self.samples, int(values[place]), _AMPLE)
                    most = min(below, times.min()) / float(price[place])
                    time = self.time(int(values[place]), slots, most)
                    times[place] = float(price[place]) * time
                    trials -= 1

        try_out({*range(0, len(values), _COARSE), len(values) - 1}, trials)
        try_out(np.argsort(bound, kind="stable")[:trials].tolist(), trials // 2)
        for reach in (_COARSE // 2, 2):
            for best in np.argsort(times, kind="stable")[:2].tolist():
                near = range(max(0, best - reach), min(len(values), best + reach + 1))
                try_out(near, min(2 * reach, trials // 3))
        return int(values[times.argmin()]), float(times.min())

    def best_slots(self, tokens: int) -> int:
        """Slots of rows of so many tokens with the least predicted time.

        The fewest that are as good as the best: each slot takes memory.
        """
        tried = sorted({slots_for(self.samples, tokens, factor) for factor in _SLOT_FACTORS_TRIED})
        times: list[float] = []
        for slots in tried:
            most = (1 + _WORTH_OF_SLOTS) * min(times, default=np.inf)
            times.append(self.time(tokens, slots, most))
        enough = [n for n, time in enumerate(times) if time <= (1 + _WORTH_OF_SLOTS) * min(times)]
        slots, time = tried[enough[0]], times[enough[0]]
        if self._epochs > 1:
            for fewer in range(slots - 1, max(0, slots - SLOTS_UNIT), -1):
                if self.time(tokens, fewer, time) > time:
                    break
                slots = fewer
        return slots

    def _candidates(self, footprint: np.ndarray, least: int, most: int) -> np.ndarray:
        """[K] int64, ascending: T evenly on a logarithmic scale, and sums of common lengths.

        All are whole units, but M_mem may be just the sum of some samples, or hardly more than the
        longest: it is among them as it is, too, and rounded down to a multiple of `_ALIGNED`.
        """
        align, count = self.policy.align, int(np.ceil(np.log(most / least) / np.log(_STEP))) + 1
        even = np.geomspace(least, most, count)
        lengths, counts = np.unique(footprint, return_counts=True)
        common = lengths[np.argsort(-lengths * counts, kind="stable")[:_COMMON_LENGTHS]]
        sums = {int(most // length * length) for length in common}
        for first in common[common <= most]:
            sums |= {int(first + (most - first) // other * other) for other in common}
        total = int(footprint.sum())
        rows = self.topology.ranks * np.arange(1, 5)
        found = np.ceil(np.r_[least, even, total / rows, list(sums), most]).astype(np.int64)
        units, wide = np.lcm(align, _units(found)), np.lcm(align, _ALIGNED)
        found = -(-found // units) * units
        found = np.r_[found, [most // unit * unit for unit in (units[-1], wide, align)]]
        return np.unique(found[(found >= least) & (found <= most)])

    def _lower_bounds(self, values: np.ndarray, footprint: np.ndarray) -> np.ndarray:
        """[K]: what `time` is at least with rows of these tokens ([K])."""
        ranks, weight = self.topology.ranks, marginal_cost(self.policy.cost, footprint)
        steps = np.ceil(footprint.sum() / (ranks * values.astype(np.float64))).astype(np.int64)
        empty = empty_row_cost(self.policy.cost, values, np.zeros(len(values)))
        least = weight.sum() / ranks
        if self.policy.context == 1:
            # The costliest samples of all steps: those of one step hide ranks − 1 others.
            upto = np.cumsum(weight[::ranks])
            least = np.maximum(least, upto[np.minimum(steps, len(upto)) - 1])
        if self._noise is None:
            return np.asarray(self._per_token * (steps * empty + least))
        # More steps of fewer samples may reach a loss sooner.
        share = self._noise / len(footprint)
        steps = np.maximum(steps, np.sqrt(least / np.maximum(share * empty, _LEAST)))
        return np.asarray((steps * empty + least) * (1 / steps + share))


def _units(tokens: np.ndarray) -> np.ndarray:
    """Powers of two of which rows of about so many tokens are multiples, [K] int64 each."""
    return 2 ** np.log2(np.maximum(tokens / _FEWEST_UNITS, 1)).astype(np.int64)
