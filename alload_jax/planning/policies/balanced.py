"""Packed rows that are full and cost the same on every rank of a step."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, CostModel, marginal_cost
from alload_jax.planning.epoch import EpochPlan, RowShape
from alload_jax.planning.policies.balanced_window import RowCosts, WindowPlanner
from alload_jax.planning.policies.packed import (
    PackedEpochBuilder,
    refuse_unplaceable,
    row_shape,
)
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.policies.queue import Window, place_all
from alload_jax.planning.policies.splitting import (
    SplitRule,
    allowed_split_sizes,
    fair_share,
    region_multiple,
    region_segments,
)
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.topology import RankTopology

_FEWEST_SAMPLES = 8192
"""Minimum samples of a window: with fewer, rows of equal cost are hard to find."""

_SLOT_FACTOR = 2.5
"""Rows mix long and short samples, so that few hold many more than the mean."""

_WINDOWS_FOR_SPLIT_SIZES = 8
"""From which the values of A are chosen: split samples are few, and vary from window to window."""


@dataclass(frozen=True)
class Balanced(Policy):
    """Fills rows to M_mem tokens at most, and groups rows of equal predicted cost into steps.

    A greedy assignment gives the samples of a window to all rows of its steps at once (`greedy`).
    It evens out both tokens and cost as far as the samples allow. Rows that still cost more than
    others, because they hold a long sample, are deferred to a later window until there is one for
    every rank (`grouping`), as long documents are in WLB-LLM (arXiv 2503.17924). With a
    context-parallel group, samples that cost more than a rank's fair share are split instead
    (`splitting`), as in Zellige (arXiv 2608.01150).

    Attributes:
      m_mem: T, tokens of a row.
      cost: the cost model.
      m_comp: maximum cost of a row with more than one sample; None for no bound.
      align: samples begin at multiples of this many tokens.
      max_segments: M, most whole samples of a row, and most split samples of a group (of each
        of its ranks, where all is split); None for 2.5 times the mean.
      look_ahead: steps of a window, if these hold some thousand samples.
      max_delay: windows that may defer a sample.
      context: ranks of a context-parallel group; 1 splits nothing.
      seconds_per_split_token: of communication, for each of the A tokens of a rank that are split.
      split_above: samples that cost more than this many times a mean row are split; 0 splits all.
    """

    name: ClassVar[str] = "balanced"
    packed: ClassVar[bool] = True
    splits_samples: ClassVar[bool] = True
    has_m_comp: ClassVar[bool] = True

    m_mem: int
    cost: CostModel
    m_comp: float | None = None
    align: int = 1
    max_segments: int | None = None
    look_ahead: int = 32
    max_delay: int = 8
    context: int = 1
    seconds_per_split_token: float = 0.0
    split_above: float = 1.0

    @classmethod
    def from_config(cls, config: PlanningConfig, costs: CostFile) -> Self:
        """See `Policy.from_config`."""
        return cls(
            m_mem=config.required_m_mem(costs),
            cost=config.predictor(costs),
            m_comp=config.m_comp_value,
            align=config.align,
            max_segments=config.max_segments,
            look_ahead=config.look_ahead,
            max_delay=config.max_delay,
            context=config.context,
            seconds_per_split_token=config.seconds_per_split_token(costs),
            split_above=config.split_above,
        )

    def plan_epoch(
        self, samples: Samples, topology: RankTopology, rng: np.random.Generator
    ) -> EpochPlan:
        """See `Policy.plan_epoch`."""
        if topology.ranks % self.context:
            raise InputError(
                f"planning.context is {self.context}, which does not divide {topology.ranks} "
                "ranks; choose a divisor"
            )
        shape = row_shape(samples, self.m_mem, self.max_segments, self.align, _SLOT_FACTOR)
        refuse_unplaceable(samples, shape, self, topology.ranks, self.context)
        footprint, weights = shape.footprint(samples.seq_len), self._weights(samples.seq_len)
        mean_row_tokens = self._mean_row_tokens(shape, footprint, weights)
        steps = self._window_steps(footprint, topology.ranks, mean_row_tokens)
        rule = self._rule(footprint, weights, topology.ranks, steps, shape.segments)
        shape = self._split_shape(shape, rule, samples.seq_len[~rule.applies(footprint, weights)])
        planner = WindowPlanner(
            shape=shape,
            rule=rule,
            costs=self._row_costs(),
            weights=weights,
            samples=samples,
            ranks=topology.ranks,
            steps=steps,
            mean_row_tokens=mean_row_tokens,
            max_delay=self.max_delay,
            rng=rng,
        )
        epoch = PackedEpochBuilder(shape, topology)

        def place(window: Window) -> np.ndarray:
            placed_steps, placed = planner.place(window)
            epoch.add(placed_steps)
            return placed

        window_tokens = int(steps * topology.ranks * mean_row_tokens)
        place_all(rng.permutation(len(samples)), footprint, window_tokens, place)
        return epoch.finish()

    def m_comp_measure(self, seq_len: np.ndarray) -> np.ndarray:
        """Cost of a row that holds one sample; see `Policy.m_comp_measure`."""
        return self._empty_row_cost() + self._weights(seq_len)

    def _weights(self, seq_len: np.ndarray) -> np.ndarray:
        """The marginal cost of a sample, that is beyond padding of its length."""
        return marginal_cost(self.cost, seq_len)

    def _empty_row_cost(self) -> float:
        """The cost of a row of padding."""
        return self.cost.fixed_cost + float(self.cost.padding_cost(np.asarray(self.m_mem)))

    def _row_costs(self) -> RowCosts:
        """What a row costs, and what M_comp leaves it for the weights of its samples."""
        empty, bounded = self._empty_row_cost(), self.m_comp is not None
        max_load = np.inf if self.m_comp is None else max(0.0, self.m_comp - empty)
        return RowCosts(empty, self.seconds_per_split_token, bounded, max_load)

    def _mean_row_tokens(
        self, shape: RowShape, footprint: np.ndarray, weights: np.ndarray
    ) -> float:
        """Tokens that a row will hold on average: M_comp or M may bind before M_mem does."""
        mean, density = footprint.mean(), weights.sum() / footprint.sum()
        by_load = self._row_costs().max_load / density if density else np.inf
        # Where even one sample is over M_comp, a row holds one.
        return float(max(mean, min(shape.capacity, by_load, shape.segments * mean)))

    def _window_steps(self, footprint: np.ndarray, ranks: int, mean_row_tokens: float) -> int:
        """Steps of a window: the look-ahead, or more to hold enough samples; at most an epoch's."""
        per_step = max(1.0, ranks * mean_row_tokens / float(footprint.mean()))
        epoch = -(-int(footprint.sum()) // max(1, int(ranks * mean_row_tokens)))
        return max(1, min(epoch, max(self.look_ahead, int(np.ceil(_FEWEST_SAMPLES / per_step)))))

    def _split_shape(self, shape: RowShape, rule: SplitRule, whole: np.ndarray) -> RowShape:
        """The row with its split regions; `whole` are the tokens of samples that are not split."""
        return replace(
            shape,
            context=self.context,
            split_sizes=tuple(rule.split_sizes.tolist()),
            region_segments=rule.segments,
            longest_whole=int(whole.max(initial=1)),
        )

    def _rule(
        self, footprint: np.ndarray, weights: np.ndarray, ranks: int, steps: int, segments: int
    ) -> SplitRule:
        """Decided from windows that depend on the manifest alone: epochs share programs."""
        share = self.split_above * fair_share(footprint, weights, self.m_mem)
        if not self.split_above:  # a group's samples are those of all its rows
            segments *= self.context
        rule = SplitRule(self.context, share, self.m_mem, np.zeros(1, np.int64), segments)
        if self.context == 1:
            return rule
        epoch = -(-int(footprint.sum()) // (ranks * self.m_mem))
        steps = max(1, min(epoch, _WINDOWS_FOR_SPLIT_SIZES * steps))
        drawn = _typical(footprint, steps * ranks * self.m_mem)
        per_step = ranks // self.context
        split_sizes = allowed_split_sizes(
            footprint[drawn],
            weights[drawn],
            rule,
            steps * per_step,
            per_step,
            region_multiple(self.m_mem, self.align),
        )
        rule = replace(rule, split_sizes=split_sizes)
        return replace(rule, segments=region_segments(rule, footprint, weights))


def _typical(footprint: np.ndarray, tokens: int) -> np.ndarray:
    """Samples with about this many tokens in total, with the longest of all; longest first.

    They depend on the manifest alone.
    """
    drawn = np.random.default_rng(0).permutation(len(footprint))
    upto = int(np.searchsorted(np.cumsum(footprint[drawn]), tokens))
    drawn = np.r_[drawn[: max(1, upto)], np.argmax(footprint)]
    return drawn[np.argsort(-footprint[drawn], kind="stable")]
