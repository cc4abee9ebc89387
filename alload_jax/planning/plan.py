"""A plan: step i as a pure function of data set, settings, seed and i; written to files."""

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from alload_jax.errors import InputError
from alload_jax.files import replacing
from alload_jax.planning.cost import CostModel
from alload_jax.planning.epoch import (
    EpochPlan,
    Step,
    micro_batch,
    number_repetitions,
    times_placed,
)
from alload_jax.planning.policies.bucketed import Bucketed
from alload_jax.planning.policies.policy import Policy, RankTopology
from alload_jax.planning.policies.windows import place_again
from alload_jax.planning.samples import Samples, digest
from alload_jax.processes import waits

LATER_FIELDS = {"split_above": 1.0, "ranks_per_group": 1, "refitted": None, "noise_scale": None}
"""Fields that identities in the first checkpoints lack → their values for those plans."""
_RENAMED = {"anchor_seconds": "seconds_per_split_token"}
"""Names of fields in old checkpoints → their present names."""


@dataclass(frozen=True)
class Recalibration:
    """A cost model that plans the epochs from one on.

    Attributes:
      epoch: the first epoch that it plans.
      cost: the model.
    """

    epoch: int
    cost: CostModel


class Revision(NamedTuple):
    """Measured times by which the steps of later windows are placed again.

    Attributes:
      step: the first step of the first of these windows.
      cost: the cost model of a rank of speed 1.
      speed: speed of each rank; empty where all are equal.
    """

    step: int
    cost: CostModel
    speed: tuple[float, ...] = ()


class Beginning(NamedTuple):
    """Where a plan begins that goes on with other samples than the steps before it.

    Attributes:
      epoch: the epoch of its first step.
      step: its first step.
      done: [N] int64, how often the earlier steps of that epoch took each sample; None for none.
    """

    epoch: int = 0
    step: int = 0
    done: np.ndarray | None = None


_START = Beginning()
_EPOCHS_KEPT = 2
"""Epochs whose plans stay in memory, and half as many as windows."""
_WINDOW, _ROWS = 32, 1024
"""Steps of a window, at least about so many, and rows of its ranks."""


@waits("for the plan")
class Plan:
    """An infinite sequence of steps with random access; every epoch holds all samples, anew."""

    def __init__(
        self,
        samples: Samples,
        policy: Policy,
        topology: RankTopology,
        seed: int,
        starts: Sequence[int] = (0,),
        recalibrations: Sequence[Recalibration] = (),
        beginning: Beginning = _START,
        revisions: Sequence[Revision] = (),
    ):
        """Plans with `policy` over `samples` for the ranks of `topology`.

        Args:
          samples: the samples of the data set.
          policy: the policy.
          topology: the ranks.
          seed: seed of the order of samples.
          starts: first steps of the epochs from that of `beginning` on, as far as they are known.
          recalibrations: of the policy, in the order of their epochs.
          beginning: where it goes on from steps of other samples.
          revisions: of windows of steps, in their order.

        Raises:
          InputError: the policy cannot place a sample, or cannot follow weights.
        """
        self.samples = samples
        self.policy = policy
        self.topology = topology
        self.seed = seed
        self.recalibrations = tuple(recalibrations)
        self.beginning = beginning
        self.revisions = tuple(revisions)
        self._repeats = samples.repeats(seed)
        self.fixed_epoch_length = (
            not policy.packed
            and (self._repeats is None or self._repeats.is_even)
            and not beginning.step
        )
        self._starts = list(starts) if not beginning.step else [beginning.step, *starts[1:]]
        self._planned: OrderedDict[tuple[int, bool], EpochPlan] = OrderedDict()
        self._windows: OrderedDict[int, EpochPlan] = OrderedDict()
        self._planning = threading.RLock()
        if len(self._starts) == 1 and not beginning.step:
            self.epoch_of_steps(0)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch, and of every one of a bucketed plan without weights, or whole.

        Other epochs differ by a few steps, so all before a step are planned once to find it.
        """
        return self.epoch(0).steps if self.beginning.step else self._starts[1]

    def __reduce__(self) -> tuple[Callable[[], "Plan"], tuple[()]]:
        """Pickles the plan's inputs and starts of epochs; the worker process plans again."""
        return partial(Plan, **self._inputs()), ()

    def _inputs(self, **changed: Any) -> dict[str, Any]:
        """What the plan is made of, with some of it changed."""
        changes = ("recalibrations", "beginning", "revisions")
        names = ("samples", "policy", "topology", "seed", *changes)
        given = {name: getattr(self, name) for name in names}
        return given | {"starts": self.starts} | changed

    def recalibrated(self, epoch: int, cost: CostModel) -> "Plan":
        """The plan whose epochs from `epoch` on, 1 or later, follow another cost model.

        Its earlier epochs are those of this plan, and it needs no other programs.
        """
        kept = (each for each in self.recalibrations if each.epoch < epoch)
        recalibrations = (*kept, Recalibration(epoch, cost))
        starts = self._starts[: max(1, epoch - self.beginning.epoch + 1)]
        return Plan(**self._inputs(starts=starts, recalibrations=recalibrations))

    def continued(self, recalibrations: Sequence[Recalibration], starts: Sequence[int]) -> "Plan":
        """The plan as a run has left it, which plans no epoch to know the first steps of others.

        Args:
          recalibrations: of the run, in the order of their epochs.
          starts: `starts` of its plan; empty if they are not known.
        """
        known = starts or self._starts[:1]
        return Plan(**self._inputs(starts=known, recalibrations=recalibrations))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first steps of the epochs from that of `beginning` on, as far as they are known."""
        return tuple(self._starts)

    def revised(self, revision: Revision) -> "Plan":
        """The packed plan with a revision after its own, of which the last two are kept.

        Its windows hold the samples that they hold in this plan, in as many steps.
        """
        found = object.__new__(Plan)  # `copy` would call `__reduce__`, and plan the epoch again
        vars(found).update(vars(self), revisions=(*self.revisions[-2:], revision))
        kept = ((first, plan) for first, plan in self._windows.items() if first < revision.step)
        found._windows = OrderedDict(kept)
        return found

    def beginning_at(self, beginning: Beginning) -> "Plan":
        """The plan that goes on from steps of other samples; in the next epoch, if this is over."""
        counts = self._counts(beginning.epoch, beginning.done)
        if counts is not None and not counts.any():
            beginning = Beginning(beginning.epoch + 1, beginning.step)
        return Plan(**self._inputs(starts=(0,), beginning=beginning))

    def done_before(self, index: int) -> tuple[int, np.ndarray]:
        """The epoch of step `index`, and [N] how often its earlier steps take each sample."""
        epoch, within = self.locate(index)
        (window, last), whole = self.of_step(index), self.epoch_of_steps(epoch)
        earlier = (whole.only(0, within - last), window.only(0, last))
        done = np.rint(sum(map(times_placed, earlier))).astype(np.int64)
        before = self.beginning.done if epoch == self.beginning.epoch else None
        return epoch, done if before is None else done + before

    def cost_model(self, epoch: int) -> CostModel | None:
        """The cost model that an epoch was recalibrated with; None for the policy's own."""
        found = (each.cost for each in reversed(self.recalibrations) if each.epoch <= epoch)
        return next(found, None)

    def end_of_epoch(self, index: int) -> int:
        """The first step of the epoch that follows the one of step number `index`."""
        epoch, within = self.locate(index)
        return index - within + self.epoch_of_steps(epoch).steps

    def window(self, index: int) -> range:
        """The steps of the window of step number `index`: about 1,024 rows, 32 to 128 steps.

        Windows divide each epoch evenly.
        """
        epoch, within = self.locate(index)
        steps = self.epoch_of_steps(epoch).steps
        usual = max(_WINDOW, min(4 * _WINDOW, _ROWS // self.topology.ranks))
        count = max(1, round(steps / usual))
        number, first = ((within + 1) * count - 1) // steps, index - within
        return range(first + number * steps // count, first + (number + 1) * steps // count)

    def revision(self, index: int) -> Revision | None:
        """What the window of step number `index` is placed by; None for the epoch's plan."""
        if not self.revisions:
            return None
        start = self.window(index).start
        return next((each for each in reversed(self.revisions) if each.step <= start), None)

    def of_step(self, index: int) -> tuple[EpochPlan, int]:
        """The plan of the epoch, or window, that has step number `index`, and its place there."""
        epoch, within = self.locate(index)
        whole, revision = self.epoch_of_steps(epoch), self.revision(index)
        if revision is None:
            return whole, within
        steps = self.window(index)
        with self._planning:
            if steps.start not in self._windows:
                first = within - (index - steps.start)
                part = whole.only(first, first + len(steps))
                speed = np.asarray(revision.speed or (1.0,) * self.topology.ranks)
                rng = np.random.default_rng([self.seed, 2, steps.start])
                found = place_again(part, self.policy, self.topology, revision.cost, speed, rng)
                self._windows[steps.start] = found
                while len(self._windows) > 2 * _EPOCHS_KEPT:
                    self._windows.popitem(last=False)
            return self._windows[steps.start], index - steps.start

    def epoch(self, number: int) -> EpochPlan:
        """The plan of a whole epoch.

        Raises:
          InputError: the policy cannot place a sample.
        """
        return self._planned_epoch(number, None)

    def epoch_of_steps(self, number: int) -> EpochPlan:
        """The plan of an epoch as the steps take it: of the first one, what is left to do."""
        found = self._planned_epoch(
            number, self.beginning.done if number == self.beginning.epoch else None
        )
        with self._planning:
            if number - self.beginning.epoch + 1 == len(self._starts):
                self._starts.append(self._starts[-1] + found.steps)
        return found

    def _planned_epoch(self, number: int, done: np.ndarray | None) -> EpochPlan:
        key = (number, done is None)
        with self._planning:
            if key not in self._planned:
                self._planned[key] = self._plan_epoch(number, done)
                while len(self._planned) > _EPOCHS_KEPT:
                    self._planned.popitem(last=False)
            return self._planned[key]

    def _plan_epoch(self, number: int, done: np.ndarray | None) -> EpochPlan:
        """Plans an epoch, or what is left of it; with how often each sample stands in it."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, number])))
        cost = self.cost_model(number)
        policy = self.policy.recalibrated(cost) if cost else self.policy
        if (counts := self._counts(number, done)) is None:
            return policy.plan_epoch(self.samples, self.topology, rng)
        found = policy.plan_epoch(self.samples.of_epoch(counts), self.topology, rng)
        if not np.array_equal(times_placed(found), counts):
            raise InputError(
                f"planning.policy {policy.name} places every sample once and cannot follow "
                "data.weights; choose another policy, or leave data.weights out"
            )
        repetition = number_repetitions(found)
        if done is not None:  # their noise is that of the times that are not done
            repetition = repetition + done[found.sample]
        return replace(found, counts=counts, repetition=repetition)

    def _counts(self, number: int, done: np.ndarray | None) -> np.ndarray | None:
        """[N] int64, how often each sample stands in an epoch or its rest; None for once each."""
        counts = None if self._repeats is None else self._repeats.counts(number)
        if done is None:
            return counts
        return np.maximum((np.ones_like(done) if counts is None else counts) - done, 0)

    def bucket_shapes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows [K], tokens of a row [K] and (frames, height, width) [K, 3] of all micro-batches.

        Of all epochs of a bucketed plan; some may stand here more than once. The shape is zeros
        where rows of a micro-batch hold samples of several shapes, each padded to those tokens.
        """
        if self._repeats is not None and isinstance(self.policy, Bucketed):
            # An epoch may lack a bucket.
            buckets, rows = self.policy.classes(self.samples, self.topology)
            return rows, buckets.seq_len, buckets.shape
        epochs = [self.epoch(0)]
        if self.beginning.done is not None:
            epochs.append(self.epoch_of_steps(self.beginning.epoch))
        found = ((epoch.rows, epoch.padded_len, epoch.shape) for epoch in epochs)
        rows, lengths, shapes = map(np.concatenate, zip(*found, strict=True))
        return rows, lengths, shapes

    def step(self, index: int) -> Step:
        """Step number `index`, counted from the start of training."""
        plan, within = self.of_step(index)
        place = plan.of_step(within)
        return Step(
            index=index,
            epoch=self.locate(index)[0],
            micro_batches=tuple(micro_batch(plan, w) for w in range(place.start, place.stop)),
        )

    def locate(self, index: int) -> tuple[int, int]:
        """The epoch of step number `index`, and the step's index within the epoch."""
        if self.fixed_epoch_length:
            return divmod(index, self.steps_per_epoch)
        with self._planning:
            while self._starts[-1] <= index:
                self.epoch_of_steps(self.beginning.epoch + len(self._starts) - 1)
        place = max(0, bisect_right(self._starts, index) - 1)
        return self.beginning.epoch + place, index - self._starts[place]

    def first_step(self, epoch: int) -> int:
        """The number of the first step of an epoch; earlier epochs are planned if it needs them."""
        if self.fixed_epoch_length:
            return epoch * self.steps_per_epoch
        place = max(0, epoch - self.beginning.epoch)
        with self._planning:
            while len(self._starts) <= place:
                self.epoch_of_steps(self.beginning.epoch + len(self._starts) - 1)
            return self._starts[place]

    @property
    def group_ranks(self) -> int:
        """Ranks of a shape group, whose micro-batches share a shape; all in synchronous plans."""
        return self.topology.ranks if self.policy.packed else self.topology.ranks_per_bucket

    @property
    def shape_groups(self) -> int:
        """Number of groups of `group_ranks` consecutive ranks."""
        return self.topology.ranks // self.group_ranks

    def identity(self) -> dict[str, object]:
        """Everything that determines the steps, as JSON values; equal identities mean equal plans.

        Recalibrations and revisions are no part of it, because they follow from the run.
        The order of the first epoch is included because NumPy versions may shuffle differently.
        """
        policy = json.loads(json.dumps(asdict(self.policy)))  # type: ignore[call-overload]
        fields = policy | vars(self.topology)
        if self._repeats is not None:
            fields = fields | {"weights": digest(self._repeats.weight)}
        return {
            "policy": type(self.policy).__name__,
            **{k: v for k, v in fields.items() if k not in LATER_FIELDS or v != LATER_FIELDS[k]},
            "seed": self.seed,
            "samples": digest(self.samples.shape, self.samples.seq_len),
            "order": digest(self.epoch(0).sample),
        }

    def fingerprint(self) -> str:
        """A short digest of `identity`."""
        content = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def current_identity(identity: Mapping[str, object]) -> dict[str, object]:
    """The identity of a plan with the present names of fields; old identities are converted."""
    return {_RENAMED.get(name, name): value for name, value in identity.items()}


METADATA_KEY = b"alload-plan"


def plan_table(plans: Mapping[int, EpochPlan], settings: Mapping[str, object]) -> pa.Table:
    """A row per placed sample, or per part of a split one, by epoch, step, micro_batch and rank.

    Columns: `epoch, step, rank, micro_batch, sample, seq_len, padded_len, tokens, offset, region,
    split_tokens, rows, slots, frames, height, width`.
    Steps count from 0 in each epoch. `sample` is the row number in the manifest. `tokens` is the
    number of its tokens on the rank and `offset` their position in the micro-batch, with rows laid
    end to end. `region` is `split` if the sample is split over the ranks of a context-parallel
    group, otherwise `whole`; the first `split_tokens` of a row are reserved for split samples.
    `rows` is the number of rows of `padded_len` tokens in the micro-batch, including padding rows;
    packed micro-batches have one, with room for `slots` samples. frames, height and width are zeros
    if unknown, packed, or if rows of several shapes are padded to one length. Plans of weighted
    samples have another column, `repetition`: which of the sample's times in the epoch it is, from
    0. A rank without a sample has no line: it computes padding in synchronous and packed plans and
    is idle in independent ones.

    Args:
      plans: the epochs by their numbers.
      settings: how the plan was made and measured (ranks, mode, m_mem, cost_model, samples, …),
        JSON values; stored in the table's metadata.
    """
    table = pa.concat_tables(_epoch_table(n, plan) for n, plan in plans.items())
    return table.replace_schema_metadata({METADATA_KEY: json.dumps(settings).encode()})


def _epoch_table(number: int, plan: EpochPlan) -> pa.Table:
    counts = np.diff(plan.offsets)
    is_split = plan.packing.is_split if plan.packing else np.zeros(len(plan.sample), bool)

    def spread(column: np.ndarray) -> np.ndarray:
        return np.repeat(column, counts)

    table = pa.table(
        {
            "epoch": np.full(len(plan.sample), number),
            "step": spread(plan.step),
            "rank": spread(plan.rank),
            "micro_batch": spread(plan.micro_batch),
            "sample": plan.sample,
            "seq_len": plan.seq_len[plan.sample],
            "padded_len": spread(plan.padded_len),
            "tokens": plan.part_tokens(),
            "offset": plan.part_offsets(),
            "region": pa.DictionaryArray.from_arrays(is_split.astype(np.int8), ["whole", "split"]),
            "split_tokens": spread(plan.packing.split_tokens if plan.packing else 0 * plan.rows),
            "rows": spread(plan.rows),
            "slots": spread(plan.slots()),
            "frames": spread(plan.shape[:, 0]),
            "height": spread(plan.shape[:, 1]),
            "width": spread(plan.shape[:, 2]),
        }
    )
    if plan.repetition is not None:
        table = table.append_column("repetition", pa.array(plan.repetition))
    return table


def replaceable(path: str | Path) -> Path:
    """The file to write for a path, with links resolved.

    Raises:
      InputError: the path is a folder or something else that is not a plain file.
    """
    if not str(path):
        raise InputError("the path of a file to write is empty; name a file")
    found = Path(os.path.realpath(path))
    if found.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    if found.exists() and not found.is_file():
        raise InputError(f"{path}: is not a plain file and would be replaced; name another")
    return found


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """`replacing` for a file that a user names, whose folder is made.

    Raises:
      InputError: the path cannot be written.
    """
    path = replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            yield unfinished
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}); name another file") from error


def write_plan(path: str | Path, table: pa.Table) -> None:
    """Writes the table of `plan_table` as Parquet, atomically; errors as of `writing`."""
    with writing(path) as unfinished:
        pyarrow.parquet.write_table(table, unfinished)
