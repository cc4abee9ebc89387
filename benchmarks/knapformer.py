"""KnapFormer's greedy balancing (arXiv 2508.06001) as a policy, to compare with ours.

    export PYTHONPATH=benchmarks
    alload plan --workload wan-480p --m-mem 66816 --ranks 4 --compare balanced knapformer:KnapFormer

In a config: `planning: {policy: "knapformer:KnapFormer", bags: g1n2+g2n1}`. It balances each global
batch by itself. All GPUs of a bag share each sequence of it, of which they exchange tokens for
heads: here a bag is a context-parallel group, and its sequences are split samples. The rule has no
bound on memory, as its batches come from data loaders. Here a batch takes as many samples of an
epoch's random order as it can with every row within M_mem.
"""

import heapq
import re
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, CostModel
from alload_jax.planning.epoch import EpochPlan, RowShape
from alload_jax.planning.policies.packed import (
    PlacedSteps,
    packed_epoch,
    refuse_unplaceable,
    row_shape,
)
from alload_jax.planning.policies.policy import Policy, RankTopology
from alload_jax.planning.policies.splitting import split_evenly
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig

_SLOT_FACTOR, _LESS, _SPLIT_SIZES = 4.0, 64, 8
"""Slots over the mean number of samples of a row. A batch that does not fit is tried again with
1/64 fewer samples. With bags of one GPU beside larger ones, A is a multiple of 1/8 of a row."""


@dataclass(frozen=True)
class KnapFormerConfig(PlanningConfig):
    """The planning section: g{GPUs}n{bags}, joined by +, are the bags of a balancing group.

    The ranks hold one such group or several; null: one, whose bags have `context` GPUs.
    """

    bags: str | None = None


def bag_sizes(bags: str, ranks: int, context: int) -> list[int]:
    """GPUs of each bag of a balancing group, ascending; InputError if there cannot be such bags."""
    found = [re.fullmatch(r"g([1-9]\d{0,5})n([1-9]\d{0,5})", each) for each in bags.split("+")]
    numbers = {int(each[1]): int(each[2]) for each in found if each}
    gpus = sum(size * number for size, number in numbers.items())
    if not len(numbers) == len(found) or ranks % gpus:
        raise InputError(
            f"planning.bags is {bags}; give g{{GPUs}}n{{bags}} for each size of bags, joined by +, "
            f"for a number of GPUs that divides the plan's {ranks} ranks"
        )
    if not numbers.keys() <= {1, context} or numbers.get(1, 0) % context:
        raise InputError(
            f"planning.bags is {bags}, but the plan's context-parallel groups have {context} ranks "
            "(mesh.context); give bags of so many GPUs, and a multiple of so many bags of one"
        )
    return [size for size in sorted(numbers) for _ in range(numbers[size])]


def assign(workload: np.ndarray, tokens: np.ndarray, sizes: list[int]) -> np.ndarray:
    """The bag of each of the sequences that a balancing group has: [N] int64.

    A bag's capacity is its GPUs' share of all workload, and its occupancy the workload that it has,
    over that. Each sequence, in descending order of workload, goes to the bag of least occupancy
    among those whose capacity is no less, and which have no more GPUs than it has tokens; where
    there is none, among those of most GPUs.

    Args:
      workload, tokens: [N] float64, [N] int64.
      sizes: GPUs of each bag, ascending.
    """
    share = float(workload.sum()) / sum(sizes)
    numbered = list(enumerate(sizes))
    bags = {size: [(0.0, bag) for bag, each in numbered if each == size] for size in sizes}
    found = np.empty(len(workload), np.int64)
    for item in np.argsort(-workload, kind="stable").tolist():
        work, most = float(workload[item]), int(tokens[item])
        able = [size for size in bags if size * share >= work and size <= most] or [sizes[-1]]
        size = min(able, key=lambda size: bags[size][0])
        load, bag = bags[size][0]  # of a GPU: occupancy times the share
        heapq.heapreplace(bags[size], (load + work / size, bag))
        found[item] = bag
    return found


@dataclass(frozen=True)
class KnapFormer(Policy):
    """The policy; fields as those of `Balanced`, rows of M_mem tokens.

    A sequence's workload is what it costs beside the fixed cost of a micro-batch.
    """

    name: ClassVar[str] = "knapformer"
    packed: ClassVar[bool] = True
    splits_samples: ClassVar[bool] = True
    config: ClassVar[type] = KnapFormerConfig

    m_mem: int
    cost: CostModel
    context: int
    bags: str | None
    max_segments: int | None
    seconds_per_split_token: float

    @classmethod
    @override
    def from_config(cls, config: KnapFormerConfig, costs: CostFile) -> Self:
        return cls(
            config.required_m_mem(costs),
            config.predictor(costs),
            config.context_value,
            config.bags,
            config.max_segments,
            config.seconds_per_split_token(costs),
        )

    @override
    def plan_epoch(
        self, samples: Samples, topology: RankTopology, rng: np.random.Generator
    ) -> EpochPlan:
        bags = self.bags or f"g{self.context}n{max(1, topology.ranks // self.context)}"
        sizes = bag_sizes(bags, topology.ranks, self.context)
        shape = self._shape(samples, set(sizes))
        refuse_unplaceable(samples, shape, self, topology.ranks, self.context)
        steps: list[PlacedSteps] = []
        order, most = samples.shuffled(rng), topology.ranks * self.m_mem
        while len(order):
            tokens = np.cumsum(samples.seq_len[order[: most // int(samples.seq_len.min())]])
            count = max(1, int(np.searchsorted(tokens, most, side="right")))
            while (
                step := self._step(order[:count], samples, topology.ranks, sizes, shape)
            ) is None:
                count -= max(1, count // _LESS)
            steps.append(step)
            order = order[count:]
        return packed_epoch(steps, shape, topology, samples.seq_len)

    def _shape(self, samples: Samples, sizes: set[int]) -> RowShape:
        """The rows: bags of one GPU have whole samples, others split ones."""
        shape = row_shape(samples.typical(), self.m_mem, self.max_segments, 1, _SLOT_FACTOR)
        if 1 in sizes:
            shape = replace(shape, longest_whole=min(self.m_mem, int(samples.seq_len.max())))
        if self.context == 1:
            return shape
        parts = _SPLIT_SIZES if 1 in sizes else 1
        return replace(
            shape,
            segments=shape.segments if 1 in sizes else 1,
            context=self.context,
            split_sizes=tuple(self.m_mem * part // parts for part in range(parts + 1)),
            region_segments=self.context * shape.segments,
            seconds_per_split_token=self.seconds_per_split_token,
        )

    def _step(
        self, sample: np.ndarray, samples: Samples, ranks: int, sizes: list[int], shape: RowShape
    ) -> PlacedSteps | None:
        """One step of these samples ([N] int64), dealt to balancing groups; None if too many."""
        seq_len, groups = samples.seq_len[sample], ranks // sum(sizes)
        workload, bag = self.cost.sequence_cost(seq_len), np.empty(len(sample), np.int64)
        for number, ours in enumerate(np.array_split(np.arange(len(sample)), groups)):
            bag[ours] = number * len(sizes) + assign(workload[ours], seq_len[ours], sizes)
        size = np.tile(sizes, groups)
        load, count = np.bincount(bag, seq_len, len(size)), np.bincount(bag, minlength=len(size))
        shared, least = size > 1, load[size > 1].max(initial=0) / self.context
        region = next((each for each in shape.split_sizes if each >= least), self.m_mem + 1)
        room = np.where(shared, self.context * region, self.m_mem - region)
        slots = np.where(shared, shape.region_segments, shape.segments)
        if (load > room).any() or (count > slots).any() or region > self.m_mem:
            return None
        whole, split = np.flatnonzero(~shared[bag]), np.flatnonzero(shared[bag])
        split = split[np.argsort(bag[split], kind="stable")]
        before = np.cumsum(seq_len[split]) - seq_len[split]
        start = before - before[np.searchsorted(bag[split], bag[split])]
        item, member, offset, tokens = split_evenly(
            start, seq_len[split], np.full(len(split), region), self.context
        )
        of, none = np.r_[whole, split[item]], np.zeros(len(whole), np.int64)
        return PlacedSteps(
            sample=sample[of],
            step=0 * of,
            rank=(np.cumsum(size) - size)[bag[of]] + np.r_[none, member],
            tokens=np.r_[seq_len[whole], tokens],
            offset=np.r_[none, offset],
            is_split=shared[bag[of]],
            split_tokens=np.asarray([region]),
        )
