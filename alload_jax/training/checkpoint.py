"""Checkpoints with Orbax, written atomically in the background."""

import itertools
import math
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import InputError, one_line
from alload_jax.training.base import BASE, Base
from alload_jax.training.checkpoint_errors import as_input_error, raise_if_lost, reason_of_storage
from alload_jax.training.checkpoint_identity import check_identity
from alload_jax.training.checksums import CHECKSUMS_NOTE, damage, write_checksums
from alload_jax.training.commit_barrier import commit_barrier
from alload_jax.training.state import TrainState

_RECALIBRATION = "recalibration"
"""The checkpoint's part that only recalibrated plans have."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved and which are kept.

    Attributes:
      every: number of optimizer steps between checkpoints; the last step is always saved. Null for
        no such interval.
      minutes: also save when this many minutes have passed since the last checkpoint; null for no
        such interval.
      keep: number of newest checkpoints to keep.
      keep_every: also keep checkpoints whose step is a multiple of this; null for none.
      keep_best: also save and keep this many checkpoints with the lowest validation loss; null for
        none.
    """

    every: int | None = 500
    minutes: float | None = None
    keep: int = 2
    keep_every: int | None = None
    keep_best: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "keep", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"checkpoint.{name} is {value}; it must be at least 1")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise InputError(f"checkpoint.minutes is {self.minutes}; it must be a number above 0")


class Checkpoints:
    """The checkpoints of a run folder; a crash during writing keeps the earlier checkpoints.

    Close it or use a `with` statement, which waits until writing has finished, also after an error.

    Attributes:
      folder: folder of the checkpoints.
      base: the frozen parameters that checkpoints leave out; None to store all.
    """

    def __init__(
        self,
        folder: str | Path,
        config: CheckpointConfig,
        identity: dict[str, Any],
        defaults: Mapping[str, Any] | None = None,
    ):
        """Opens the folder and creates it if necessary.

        Args:
          folder: folder of the checkpoints.
          config: when checkpoints are saved and which are kept.
          identity: JSON values that must be equal in a checkpoint and in the run that restores it,
            such as the model's config and the plan's fingerprint; an empty part equals a missing
            one.
          defaults: values of missing fields, for messages.
        """
        self.folder = Path(folder).absolute()
        self._identity, self._defaults = identity, defaults or {}
        self.base: Base | None = None
        self._last_begun = 0
        self._chosen: frozenset[int] = frozenset()
        self._held: frozenset[int] = frozenset()
        self._kept = _Kept(config.keep, config.keep_every, lambda: self._chosen | self._held)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._add_checksums, barrier_sync_fn=commit_barrier()
            ),
        )
        # Orbax would remove these in a thread that outlives a program that exits immediately.
        if jax.process_index() == 0:
            for left in self._unfinished():
                shutil.rmtree(left, ignore_errors=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self.close()  # else the user wants to end at once

    def steps(self) -> frozenset[int]:
        """Returns the steps of all checkpoints, also of one that is being written."""
        return frozenset(self._manager.all_steps())

    def keep(self, steps: Collection[int]) -> None:
        """Keeps the checkpoints of these steps from now on, and no longer those of the last call.

        Others are removed when the next checkpoint has been written.
        """
        self._chosen = frozenset(steps)

    def hold(self, before: int | None) -> int | None:
        """Keeps the newest checkpoint of a step below `before` until the next call.

        Returns:
          Its step; None if there is none, or nothing to hold.
        """
        found = max((step for step in self.steps() if step < (before or 0)), default=None)
        self._held = frozenset() if found is None else frozenset({found})
        return found

    def set_aside(self, start: int) -> list[str]:
        """Moves checkpoints of step `start` and later aside, to `diverged-STEP`.

        Returns:
          Their new names, in the process that moves them.

        Raises:
          InputError: a checkpoint could not be written.
        """
        self.wait()
        moved = sorted(step for step in self.steps() if step >= start)
        return [self._move(step, "diverged") for step in moved] if first_process() else []

    def _move(self, step: int, name: str) -> str:
        """Moves a checkpoint to a free name, which no run continues from; returns the name."""
        aside = _free(self.folder / f"{name}-{step}")
        (self.folder / str(step)).rename(aside)
        return aside.name

    def remove_others(self) -> None:
        """Removes the checkpoints that are not kept, once all are on disk.

        Raises:
          InputError: a checkpoint could not be written.
        """
        self.wait()
        steps = sorted(self.steps())
        for step, stays in zip(steps, self._kept.stay(steps), strict=True):
            if not stays:
                self._manager.delete(step)

    def latest(self) -> int | None:
        """Returns the step of the newest complete checkpoint; None if there is none."""
        return self._manager.latest_step()

    def continue_from(self, cluster: Cluster) -> int:
        """Finds the step to continue from, 0 for the start. A collective operation.

        Raises:
          InputError: all checkpoints are damaged.
        """
        step = cluster.broadcast(self.newest_undamaged)
        self._manager.reload()  # process 0 may have moved some
        return step or 0

    def newest_undamaged(self) -> int | None:
        """Finds the newest whole checkpoint by the checksums of its files.

        Damaged ones that are newer are moved to `damaged-STEP`, and a line says so.

        Returns:
          The step; None if there is no checkpoint.

        Raises:
          InputError: all checkpoints are damaged.
        """
        found = ""
        for step in sorted(self._manager.all_steps(), reverse=True):
            place = self.folder / str(step)
            if not (what := damage(place)):
                return step
            found = found or f"{place}: {what}"
            aside = self._move(step, "damaged")
            warning = f"warning: {place}: {what}; it is moved to {aside}"
            print(one_line(warning), file=sys.stderr)
        if found:
            raise InputError(
                f"{found}, and no other checkpoint is left; restore one from a backup, or begin "
                "again with another run.folder"
            )
        return None

    def _unfinished(self) -> list[Path]:
        return list(self.folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))

    def _add_checksums(self) -> None:
        """Adds checksums to the checkpoint that is being written, before it is complete."""
        if jax.process_index() == 0:
            for folder in self._unfinished():
                write_checksums(folder)

    def check(self, step: int) -> None:
        """Checks that a checkpoint belongs to this run's model and plan.

        Raises:
          InputError: the checkpoint is damaged or its identity differs; the message names the
            difference.
        """
        with self._errors_of_step(step):
            part = ocp.args.Composite(identity=ocp.args.JsonRestore())
            found = dict(self._manager.restore(step, args=part).identity)
        # Old versions noted no checksums; `damage` warns of them.
        found, identity = CHECKSUMS_NOTE | found, self._identity | CHECKSUMS_NOTE
        check_identity(self.folder / str(step), found, identity, self._defaults)

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Reads a checkpoint with the shardings of `like`, which is `bare` where it has a base.

        Raises:
          InputError: the checkpoint is damaged or belongs to another model or plan.
        """
        self.check(step)
        with self._errors_of_step(step):
            part = ocp.args.Composite(state=ocp.args.StandardRestore(_stored(like)))
            found = self._manager.restore(step, args=part).state
            return like._replace(**found)

    def _errors_of_step(self, step: int) -> AbstractContextManager[None]:
        remedy = "move it away to continue from the previous one"
        return as_input_error(self.folder / str(step), remedy)

    def restore_recalibration(self, step: int) -> dict[str, Any] | None:
        """Reads what `save` was given; None if it was given nothing.

        Raises:
          InputError: the checkpoint is damaged.
        """
        if not (self.folder / str(step) / _RECALIBRATION).exists():
            return None
        with self._errors_of_step(step):
            part = ocp.args.Composite(**{_RECALIBRATION: ocp.args.JsonRestore()})
            return dict(self._manager.restore(step, args=part)[_RECALIBRATION])

    def save(
        self, step: int, state: TrainState, recalibration: dict[str, Any] | None = None
    ) -> None:
        """Starts writing a checkpoint; returns when `state` may be changed.

        Args:
          step: number of steps done.
          state: the training state.
          recalibration: JSON values that the plan of the next steps depends on; None for none.
        """
        if step in self._manager.all_steps():
            return
        self._last_begun = step
        items: dict[str, Any] = {
            "state": ocp.args.StandardSave(_stored(state if self.base is None else bare(state))),
            "identity": ocp.args.JsonSave(self._identity | CHECKSUMS_NOTE),
        }
        if self.base is not None:
            items[BASE] = ocp.args.JsonSave(self.base._asdict())
        if recalibration is not None:
            items[_RECALIBRATION] = ocp.args.JsonSave(recalibration)
        with self._errors_of_writing():
            self._manager.save(step, args=ocp.args.Composite(**items))

    def check_writing(self) -> None:
        """Checks whether writing in the background has failed, without waiting.

        Raises:
          InputError: a checkpoint could not be written.
        """
        with self._errors_of_writing():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Waits until all checkpoints are on disk.

        Raises:
          InputError: a checkpoint could not be written.
        """
        with self._errors_of_writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until all checkpoints are on disk, and ends their threads.

        Raises:
          InputError: a checkpoint could not be written.
        """
        self.wait()
        self._manager.close()

    @contextmanager
    def _errors_of_writing(self) -> Iterator[None]:
        """Converts errors of Orbax to InputErrors; Orbax also raises plain Exceptions."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            raise_if_lost(self.folder / str(self._last_begun), "wrote it", error)
            whole = self._manager.latest_step()
            left = "none is whole" if whole is None else f"the newest whole one is {whole}"
            raise InputError(
                f"{self.folder / str(self._last_begun)}: this checkpoint cannot be written "
                f"({reason_of_storage(error)}), {left}; make room and run the same command again"
            ) from error


class _Kept:
    """Orbax's preservation policy: the newest checkpoints, every so many steps, and chosen ones."""

    def __init__(self, newest: int, every: int | None, chosen: Callable[[], frozenset[int]]):
        self._newest, self._every, self._chosen = newest, every, chosen

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """See `stay`."""
        del context
        return self.stay([each.step for each in checkpoints])

    def stay(self, steps: Sequence[int]) -> list[bool]:
        """Says of the checkpoint of each step, in ascending order, whether it stays."""
        chosen, newest = self._chosen(), set(steps[-self._newest :])
        return [
            step in newest or step in chosen or bool(self._every and step % self._every == 0)
            for step in steps
        ]


def _free(path: Path) -> Path:
    """The path, or with the first number behind it that no file has."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not each.exists())


def bare(state: TrainState) -> TrainState:
    """A state without its frozen parameters."""
    return state._replace(frozen={})


def _stored(state: TrainState) -> dict[str, Any]:
    """Returns the fields of a state that a checkpoint stores, those that are not empty."""
    return {name: part for name, part in state._asdict().items() if jax.tree.leaves(part)}
