"""Packed rows that are full and cost the same on every rank of a step."""

from dataclasses import dataclass, replace

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostModel, marginal_cost
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.policies.balanced_window import WindowPlanner
from alload_jax.planning.policies.packed import (
    PackedEpoch,
    RowShape,
    refuse_unplaceable,
    row_shape,
)
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.policies.queue import Window, place_all
from alload_jax.planning.policies.splitting import (
    SplitRule,
    allowed_split_sizes,
    fair_share,
    region_multiple,
    region_segments,
)
from alload_jax.planning.samples import Samples

_FEWEST_SAMPLES = 8192
"""Of a window: with fewer, rows of equal cost are hard to find."""


_SLOT_FACTOR = 2.5
"""Rows mix long and short samples, so that few hold many more than the mean."""

_WINDOWS_FOR_LEVELS = 8
"""From which the values of A are chosen: split samples are few, and vary from window to window."""


@dataclass(frozen=True)
class Balanced:
    """Fills rows to M_mem tokens at most, and groups rows of equal predicted cost into steps.

    A greedy assignment gives the samples of a window to all rows of its steps at once (`greedy`).
    It evens out both tokens and cost as far as the samples allow. Rows that still cost more than
    others, because they hold a long sample, are deferred to a later window until there is one for
    every rank (`grouping`), as long documents are in WLB-LLM (arXiv 2503.17924). With a
    context-parallel group, samples that cost more than a rank's fair share are split instead
    (`splitting`), as in Zellige (arXiv 2608.01150).

    Attributes:
      m_mem: T, tokens of a row.
      cost: predicts what rows cost.
      m_comp: most cost of a row that holds more than one sample; None for no bound.
      align: samples begin at multiples of this.
      max_segments: M, most whole samples of a row, and most split samples of a group (of each
        of its ranks, where all is split); None for 2.5 times the mean.
      look_ahead: steps of a window, if these hold some thousand samples.
      max_delay: windows that a sample waits at most.
      context: ranks of a context-parallel group; 1 splits nothing.
      seconds_per_split_token: of communication, for each of the A tokens of a rank that are split.
      split_above: samples are split that cost more than so many times a mean row; 0 splits all.
    """

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
        refuse_unplaceable(samples, shape, "balanced", topology.ranks, self.context)
        footprint = shape.footprint(samples.seq_len)
        weights = self._weights(samples.seq_len)
        row_tokens = self._row_tokens(shape, footprint, weights)
        steps = self._window_steps(footprint, topology.ranks, row_tokens)
        rule = self._rule(footprint, weights, topology.ranks, steps, shape.segments)
        whole = samples.seq_len[~rule.applies(footprint, weights)]
        epoch = PackedEpoch(
            shape,
            topology.ranks,
            topology.micro_batches_per_step,
            int(whole.max(initial=1)),
            rule.segments,
            self.context,
            tuple(rule.split_sizes.tolist()),
        )
        planner = WindowPlanner(
            self, shape, rule, topology.ranks, steps, row_tokens, weights, samples, rng
        )

        def place(window: Window) -> np.ndarray:
            placed_steps, placed = planner.place(window)
            epoch.add(placed_steps)
            return placed

        window_tokens = int(steps * topology.ranks * row_tokens)
        place_all(rng.permutation(len(samples)), footprint, window_tokens, place)
        return epoch.finish()

    def cost_alone(self, seq_len: np.ndarray) -> np.ndarray:
        """Cost of rows that hold one sample each: [N] integers → [N] float64."""
        row = self.cost.fixed_cost + self.cost.padding_cost(np.asarray(self.m_mem))
        return row + self._weights(seq_len)

    def _weights(self, seq_len: np.ndarray) -> np.ndarray:
        """What a sample costs beyond padding of its length, which a row computes anyway."""
        return marginal_cost(self.cost, seq_len)

    def most_load(self, shape: RowShape) -> float:
        """What M_comp leaves a row for the weights of its samples."""
        if self.m_comp is None:
            return np.inf
        row = self.cost.fixed_cost + self.cost.padding_cost(np.asarray(shape.tokens))
        return max(0.0, self.m_comp - float(row))

    def _row_tokens(self, shape: RowShape, footprint: np.ndarray, weights: np.ndarray) -> float:
        """Tokens that a row will hold on average: M_comp or M may bind before M_mem does."""
        mean, density = footprint.mean(), weights.sum() / footprint.sum()
        by_load = self.most_load(shape) / density if density else np.inf
        # Where even one sample is over M_comp, a row holds one.
        return float(max(mean, min(shape.tokens, by_load, shape.segments * mean)))

    def _window_steps(self, footprint: np.ndarray, ranks: int, row_tokens: float) -> int:
        """Steps of a window: the look-ahead, or more to hold enough samples; at most an epoch's."""
        per_step = max(1.0, ranks * row_tokens / float(footprint.mean()))
        epoch = -(-int(footprint.sum()) // max(1, int(ranks * row_tokens)))
        return max(1, min(epoch, max(self.look_ahead, int(np.ceil(_FEWEST_SAMPLES / per_step)))))

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
        drawn = np.random.default_rng(0).permutation(len(footprint))
        epoch = -(-int(footprint.sum()) // (ranks * self.m_mem))
        steps = max(1, min(epoch, _WINDOWS_FOR_LEVELS * steps))
        upto = int(np.searchsorted(np.cumsum(footprint[drawn]), steps * ranks * self.m_mem))
        drawn = np.r_[drawn[: max(1, upto)], np.argmax(footprint)]
        drawn = drawn[np.argsort(-footprint[drawn], kind="stable")]
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
