"""A plan over samples without an end: window by window, as far as their sizes have been read.

A window holds the samples of some steps. Those that it defers go on into the next one. The last
window of a round places all, so that none waits for longer, and the next round follows from the
seed, its number and its place in the stream: that is all that a checkpoint keeps.

What an epoch is to other plans, a window is here: the samples of a step have their numbers in its
window, and its number is the epoch of their noise.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from typing_extensions import override

from alload_jax.planning.epoch import MOST_WEIGHT, EpochPlan, Step, WindowContent
from alload_jax.planning.plan import Beginning, Plan
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.policies.packed import EASING, Window, packed_epoch, stable_order
from alload_jax.planning.policies.policy import Policy, RankTopology
from alload_jax.planning.samples import Samples, digest

_ROUND = 8
"""Windows of a round."""
_STEPS = 64
"""That samples like those of a stream fill, at least."""
_KEPT = 4
"""Windows that stay in memory, beside the first one: the loader is ahead of training."""


class Chunk(NamedTuple):
    """Some samples of a feed.

    Attributes:
      rows: [n] int64, for each sample the number of one of its size among the plan's samples.
      keys: [n], by which their content is read.
      state: from which the samples after them are read, as JSON values.
    """

    rows: np.ndarray
    keys: np.ndarray
    state: Any


class Feed(Protocol):
    """Sizes of samples in an order of their own, without an end. It pickles for the loader."""

    def chunks(self, state: Any) -> Generator[Chunk, None, None]:
        """Samples from a state on; from None the first ones. No chunk is empty.

        Raises:
          InputError: there are no more, or a size is none of those of the plan's samples.
        """
        ...


@dataclass(frozen=True)
class RoundStart:
    """Where a round begins.

    Attributes:
      window: number of its first window.
      step: its first step.
      state: of the feed.
      skip: samples after that state that earlier rounds hold.
    """

    window: int = 0
    step: int = 0
    state: Any = None
    skip: int = 0


_BEGIN = RoundStart()


def enough_samples(samples: Samples, m_mem: int, ranks: int, look_ahead: int) -> Samples:
    """The samples as often as many steps hold them, so that rows are made as for a large set.

    Args:
      samples: like those of a stream, each once.
      m_mem: most tokens of a row.
      ranks: rows of a step.
      look_ahead: steps of a window.
    """
    times = -(-max(_STEPS, look_ahead) * ranks * m_mem // int(samples.seq_len.sum()))
    return replace(samples, weight=np.full(len(samples), float(min(times, MOST_WEIGHT))))


class StreamPlan(Plan):
    """A plan of the policy `balanced` whose epochs are the windows of a stream."""

    def __init__(
        self,
        samples: Samples,
        policy: Policy,
        topology: RankTopology,
        seed: int,
        feed: Feed,
        start: RoundStart = _BEGIN,
    ):
        """Plans with `policy` over what `feed` gives.

        Args:
          samples: samples like those of the stream, by whose sizes rows and steps are made.
          policy: a `Balanced` one.
          topology: the ranks.
          seed: seed of the steps' order.
          feed: the stream.
          start: of the round in which the steps begin.

        Raises:
          ValueError: the policy is another.
          InputError: the policy cannot place a sample, or the feed ends.
        """
        if not isinstance(policy, Balanced):
            raise ValueError(f"the policy {policy.name} plans no stream; take balanced")
        self.feed, self._balanced = feed, policy
        self._rounds = {0: _BEGIN, start.window: start}
        self._reading: _Round | None = None
        self._held: OrderedDict[int, tuple[EpochPlan, WindowContent]] = OrderedDict()
        beginning = Beginning(start.window, start.step)
        super().__init__(samples, policy, topology, seed, beginning=beginning)

    @override
    def __reduce__(self) -> tuple[Callable[[], Plan], tuple[()]]:
        inputs = (self.samples, self.policy, self.topology, self.seed, self.feed)
        return partial(StreamPlan, *inputs, self._rounds[self.beginning.epoch]), ()

    @override
    def identity(self) -> dict[str, object]:
        with self._planning:
            rows, keys = self._window(0)[1]
        return super().identity() | {"stream": digest(rows, keys)}

    @override
    def step(self, index: int) -> Step:
        step = super().step(index)
        with self._planning:
            return replace(step, window=self._window(step.epoch)[1])

    def round_start(self, step: int) -> RoundStart:
        """The start of the round that holds a step, from which `starting_at` goes on."""
        window = self.locate(step)[0] // _ROUND * _ROUND
        with self._planning:
            return replace(self._rounds[window], step=self.first_step(window))

    def starting_at(self, start: RoundStart) -> "StreamPlan":
        """The same plan for steps of this round and later ones."""
        return StreamPlan(self.samples, self.policy, self.topology, self.seed, self.feed, start)

    @override
    def _planned_epoch(self, number: int, done: np.ndarray | None) -> EpochPlan:
        with self._planning:
            return self._window(number)[0]

    def _window(self, number: int) -> tuple[EpochPlan, WindowContent]:
        """A window of the stream; those before it in its round are planned, too."""
        while number not in self._held:
            reading = self._reading
            if reading is None or reading.is_over or reading.window > number:
                start = max(each for each in self._rounds if each <= number)
                reading = _Round(self, self._balanced, self._rounds[start])
            window, self._reading = reading.window, None  # an error leaves no half a window
            self._held[window], self._reading = reading.next(), reading
            if reading.is_over:
                self._rounds[reading.window] = reading.following()
            for other in list(self._held)[:-_KEPT]:
                if other:  # the first one tells what all are like
                    del self._held[other]
        return self._held[number]


class _Round:
    """The windows of a round, one after another."""

    def __init__(self, plan: StreamPlan, policy: Balanced, start: RoundStart):
        self._topology, self._seq_len = plan.topology, plan.samples.seq_len
        self._rng = np.random.default_rng([plan.seed, start.window])
        self._planner = policy.window_planner(plan.samples, plan.topology, self._rng)
        self._footprint = self._planner.shape.footprint(self._seq_len)
        self._longest_first = np.unique(-self._footprint, return_inverse=True)[1]
        self._weights = self._planner.weights
        self._chunks = plan.feed.chunks(start.state)
        self._chunk, self._state, self._taken = next(self._chunks), start.state, start.skip
        self._rows, self._keys = self._chunk.rows[:0], self._chunk.keys[:0]  # deferred samples
        self.window, self.is_over = start.window, False

    def next(self) -> tuple[EpochPlan, WindowContent]:
        """Plans the window whose number is `window`."""
        self.is_over, easing, any_placed = (self.window + 1) % _ROUND == 0, 1.0, False
        while not any_placed:
            self._read(self._planner.window_tokens * easing)
            order = stable_order(self._longest_first[self._rows])
            rows, keys = self._rows[order], self._keys[order]
            columns = {"seq_len": self._seq_len[rows], "weights": self._weights[rows]}
            self._planner = replace(self._planner, **columns)
            numbers = np.arange(len(rows))
            window = Window(numbers, self._footprint[rows], self.is_over, easing)
            steps, placed = self._planner.place(window)
            any_placed, easing = bool(placed.any()), easing * EASING
        self._rows, self._keys, self.window = rows[~placed], keys[~placed], self.window + 1
        rows, keys = rows[placed], keys[placed]
        steps = replace(steps, sample=(np.cumsum(placed) - 1)[steps.sample])
        shape, seq_len = self._planner.shape, self._seq_len[rows]
        epoch = packed_epoch([steps], shape, self._topology, seq_len, self._rng)
        return epoch, WindowContent(rows, keys)

    def following(self) -> RoundStart:
        """Where the next round begins; closes the feed."""
        self._chunks.close()
        return RoundStart(self.window, state=self._state, skip=self._taken)

    def _read(self, tokens: float) -> None:
        """Adds samples to those that are deferred, until they have so many tokens."""
        rows, keys = [self._rows], [self._keys]
        held = float(self._footprint[self._rows].sum())
        while held < tokens:
            if self._taken == len(self._chunk.rows):
                self._state, self._taken = self._chunk.state, 0
                self._chunk = next(self._chunks)
            fresh = self._chunk.rows[self._taken :]
            upto = held + np.cumsum(self._footprint[fresh])
            count = min(len(fresh), int(np.searchsorted(upto, tokens)) + 1)
            rows.append(fresh[:count])
            keys.append(self._chunk.keys[self._taken :][:count])
            self._taken, held = self._taken + count, float(upto[count - 1])
        self._rows, self._keys = np.concatenate(rows), np.concatenate(keys)
