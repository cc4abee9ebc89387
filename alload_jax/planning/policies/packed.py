"""What packed policies share: rows of a fixed number of tokens that hold many samples each."""

from dataclasses import dataclass, field

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.epoch import EpochPlan, Packing, RowShape
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.policies.step_order import even_order
from alload_jax.planning.samples import Samples
from alload_jax.planning.topology import RankTopology

_NAMED = 5


def row_shape(
    samples: Samples,
    capacity: int,
    segments: int | None,
    align: int,
    slot_factor: float,
    setting: str = "m_mem",
) -> RowShape:
    """The row that a policy fills with whole samples.

    Args:
      samples: of the manifest.
      capacity: T.
      segments: M; None for `slot_factor` times the samples of a mean row, at most what fits.
      align: of samples' beginnings.
      slot_factor: see `segments`.
      setting: name of the setting that gives `capacity`, for messages.

    Raises:
      InputError: `align` does not divide `capacity`.
    """
    if align > capacity:
        raise InputError(
            f"planning.align is {align}, more than {setting} = {capacity}; make it smaller"
        )
    if capacity % align:
        raise InputError(
            f"planning.align is {align}, which does not divide {setting} = {capacity}; "
            f"set {setting} to {capacity // align * align}"
        )
    if segments is None:
        typical = capacity / max(1.0, float(samples.seq_len.mean()))
        most = max(1, capacity // int(samples.seq_len.min()))
        segments = min(most, -(-int(np.ceil(slot_factor * typical)) // 4) * 4)
    return RowShape(capacity, segments, align)


def refuse_unplaceable(
    samples: Samples,
    shape: RowShape,
    policy: Policy,
    ranks: int,
    context: int = 1,
    setting: str = "m_mem",
) -> None:
    """Raises InputError, naming the samples, where one is too long even if split `context`-fold."""
    most = shape.capacity * context
    needed = shape.footprint(samples.seq_len)
    too_long = np.flatnonzero(needed > most)
    if not len(too_long):
        return
    longest = int(needed.max())
    named = ", ".join(f"{k} ({samples.seq_len[k]} tokens)" for k in too_long[:_NAMED])
    more = f" and {len(too_long) - _NAMED} more" if len(too_long) > _NAMED else ""
    per_rank = -(-longest // (context * shape.align)) * shape.align
    remedy = f"set {setting} to at least {per_rank}"
    wider = [c for c in range(1, ranks + 1) if ranks % c == 0 and c * shape.capacity >= longest]
    if wider and policy.splits_samples:
        remedy += f", or context to at least {wider[0]}"
    split = f", and {context} ranks hold {most}" if context > 1 else ""
    raise InputError(
        f"policy {policy.name}: {setting} is {shape.capacity} tokens{split}, shorter than sample "
        f"{named}{more}; {remedy}"
    )


@dataclass(frozen=True)
class PlacedSteps:
    """Steps of one window, by their parts (see `RowShape`).

    Attributes:
      sample, step, rank, tokens: [P] int64; steps count from 0 in each window.
      offset: [P] int64, where a part of a split sample begins; ignored of whole samples.
      is_split: [P] bool.
      split_tokens: [K] int64, A of each step.
    """

    sample: np.ndarray
    step: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray
    offset: np.ndarray
    is_split: np.ndarray
    split_tokens: np.ndarray


def whole_samples(
    sample: np.ndarray,
    seq_len: np.ndarray,
    step: np.ndarray,
    rank: np.ndarray,
    steps: int,
) -> PlacedSteps:
    """Steps without split samples.

    Args:
      sample, step, rank: [P] int64.
      seq_len: tokens of every sample of the manifest.
      steps: K.
    """
    none = np.zeros(len(sample), np.int64)
    return PlacedSteps(
        sample=sample,
        step=step,
        rank=rank,
        tokens=seq_len[sample],
        offset=none,
        is_split=none.astype(bool),
        split_tokens=np.zeros(steps, np.int64),
    )


@dataclass
class PackedEpochBuilder:
    """Joins the windows' steps into an epoch."""

    shape: RowShape
    topology: RankTopology
    _windows: list[PlacedSteps] = field(default_factory=list)

    def add(self, steps: PlacedSteps) -> None:
        """Appends a window's steps."""
        if len(steps.split_tokens):
            self._windows.append(steps)

    def finish(self, rng: np.random.Generator | None = None) -> EpochPlan:
        """The epoch.

        Args:
          rng: puts the steps of all windows in random order; None leaves them as they were added.
        """
        ranks = self.topology.ranks
        turns, row, parts, split_tokens = self._sorted_parts(rng)
        offsets = np.searchsorted(row, np.arange(turns * ranks + 1))
        after = _after_split_region(
            parts["is_split"], self.shape.footprint(parts["tokens"]), row, offsets
        )
        step, micro_batch = np.divmod(np.arange(turns), self.topology.micro_batches_per_step)
        return EpochPlan(
            ranks=ranks,
            steps=int(step[-1]) + 1,
            step=np.repeat(step, ranks),
            micro_batch=np.repeat(micro_batch, ranks),
            rank=np.tile(np.arange(ranks), turns),
            rows=np.ones(turns * ranks, np.int64),
            padded_len=np.full(turns * ranks, self.shape.capacity),
            shape=np.zeros((turns * ranks, 3), np.int64),
            offsets=offsets,
            sample=parts["sample"],
            packing=Packing(
                **vars(self.shape),
                split_tokens=split_tokens,
                tokens=parts["tokens"],
                offset=np.where(parts["is_split"], parts["offset"], split_tokens[row] + after),
                is_split=parts["is_split"],
            ),
        )

    def _sorted_parts(
        self, rng: np.random.Generator | None
    ) -> tuple[int, np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """All windows' parts in the order of their rows.

        Returns:
          The number of turns (steps of windows, one micro-batch a rank), the row of each part
          [P], columns of the parts [P], and A of each row [turns · ranks].
        """
        counts = [len(window.split_tokens) for window in self._windows]
        firsts = np.cumsum([0, *counts[:-1]])

        def column(name: str) -> np.ndarray:
            return np.concatenate([getattr(window, name) for window in self._windows])

        turn = np.concatenate(
            [window.step + first for window, first in zip(self._windows, firsts, strict=True)]
        )
        turns = int(sum(counts))
        place = np.arange(turns)
        if rng is not None:
            place = even_order(turn, column("tokens"), turns, rng)
        row = place[turn] * self.topology.ranks + column("rank")
        is_split = column("is_split")
        # Within a row: split samples by their place, then whole ones in the order of assignment.
        order = np.lexsort((np.where(is_split, column("offset"), 0), ~is_split, row))
        names = ("sample", "tokens", "offset", "is_split")
        parts = {name: column(name)[order] for name in names}
        split_tokens = np.empty(turns, np.int64)
        split_tokens[place] = column("split_tokens")
        return turns, row[order], parts, np.repeat(split_tokens, self.topology.ranks)


def _after_split_region(
    is_split: np.ndarray, footprint: np.ndarray, row: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """[P]: where each whole sample begins, counted from the end of its row's split samples."""
    taken = np.where(is_split, 0, footprint)
    before = np.cumsum(taken) - taken
    start = np.r_[before, before[-1:] + taken[-1:]][offsets[:-1]]
    return before - start[row]
