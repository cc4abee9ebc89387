"""Checkpoints with Orbax, written atomically in the background; the best ones are kept."""

import itertools
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import jax
import orbax.checkpoint as ocp

from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.distributed.coordination import VISIBLE_SECONDS
from alload_jax.errors import InputError, one_line, print_stderr
from alload_jax.files import Json, read_json
from alload_jax.processes import waits
from alload_jax.training import CheckpointConfig
from alload_jax.training.checkpoint_files import (
    BASE,
    CHECKSUMS_NOTE,
    Base,
    as_input_error,
    check_identity,
    commit_barrier,
    damage,
    read_part,
    with_samples_of,
    write_checksums,
)
from alload_jax.training.run_files import write_json
from alload_jax.training.state import TrainState

_RECALIBRATION = "recalibration"
"""The checkpoint's part that only recalibrated plans have."""
_REMEDY = "move it away to continue from the previous one"


@waits("for a checkpoint to be written")
class Checkpoints:
    """The checkpoints of a run folder; a crash during writing keeps the earlier checkpoints.

    Close it or use a `with` statement, which waits until writing has finished, also after an error.

    Attributes:
      folder: folder of the checkpoints.
      base: the frozen parameters that checkpoints leave out; None to store all.
      other_samples: whether checkpoints of the run with other samples are its own.
    """

    def __init__(
        self,
        folder: str | Path,
        config: CheckpointConfig,
        identity: Json,
        defaults: Mapping[str, object] | None = None,
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
        self.other_samples = False
        self._last_begun = 0
        self._chosen: frozenset[int] = frozenset()
        self._held: frozenset[int] = frozenset()
        self._config = config
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._add_checksums, barrier_sync_fn=commit_barrier()
            ),
        )
        # Orbax would remove these in a thread that outlives a program that exits immediately.
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
        path = self.folder / f"{name}-{step}"
        numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
        aside = next(each for each in itertools.chain([path], numbered) if not each.exists())
        (self.folder / str(step)).rename(aside)
        return aside.name

    def remove_others(self) -> None:
        """Removes the checkpoints that are not kept, once all are on disk.

        Raises:
          InputError: a checkpoint could not be written.
        """
        self.wait()
        for step in self.steps() - self._staying(sorted(self.steps())):
            self._manager.delete(step)

    def should_preserve(
        self, checkpoints: Sequence[ocp.checkpoint_manager.CheckpointInfo], **_: object
    ) -> list[bool]:
        """As Orbax's preservation policy, whether each checkpoint stays, by ascending step."""
        steps = [each.step for each in checkpoints]
        staying = self._staying(steps)
        return [step in staying for step in steps]

    def _staying(self, steps: Sequence[int]) -> set[int]:
        """The newest ones, every so many steps, and chosen ones."""
        every = self._config.keep_every
        periodic = {step for step in steps if every and step % every == 0}
        return periodic | set(steps[-self._config.keep :]) | self._chosen | self._held

    def continue_from(self, cluster: Cluster) -> int:
        """Finds the step to continue from, 0 for the start. A collective operation.

        It waits until this host shows the checkpoints that process 0 sees. A process that saw
        others would later not save when the rest do, which then would wait for it.

        Raises:
          InputError: all checkpoints are damaged, or this host does not show the same in time.
        """

        def find() -> tuple[int, list[int]]:
            step = self.newest_undamaged() or 0
            self._manager.reload()  # it may have moved some
            return step, sorted(self.steps())

        (step, known), end = cluster.broadcast(find), time.monotonic() + VISIBLE_SECONDS
        while sorted(self.steps()) != known:
            if time.monotonic() > end:
                raise InputError(
                    f"{self.folder}: this host shows checkpoints {sorted(self.steps())}, but that "
                    f"of process 0 {known}; mount one file system on all hosts"
                )
            time.sleep(0.1)
            self._manager.reload()
        return step

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
            print_stderr(one_line(f"warning: {place}: {what}; it is moved to {aside}"))
        if found:
            raise InputError(
                f"{found}, and no other checkpoint is left; restore one from a backup, or begin "
                "again with another run.folder"
            )
        return None

    def _unfinished(self) -> list[Path]:
        """What is being written, or was cut off, in process 0; the others leave it alone."""
        found = self.folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*")
        return list(found) if jax.process_index() == 0 else []

    def _add_checksums(self) -> None:
        """Adds checksums to the checkpoint that is being written, before it is complete."""
        for folder in self._unfinished():
            write_checksums(folder)

    def check(self, step: int) -> None:
        """Checks that a checkpoint belongs to this run's model and plan.

        Raises:
          InputError: the checkpoint is damaged or its identity differs; the message names the
            difference.
        """
        found = read_part(self.folder / str(step), "identity", _REMEDY)
        # Old versions noted no checksums; `damage` warns of them.
        found, identity = CHECKSUMS_NOTE | found, self._identity | CHECKSUMS_NOTE
        if self.other_samples:
            found = with_samples_of(found, identity)
        check_identity(self.folder / str(step), found, identity, self._defaults)

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Reads a checkpoint with the shardings of `like`, without frozen ones where it has a base.

        Raises:
          InputError: the checkpoint is damaged or belongs to another model or plan.
        """
        self.check(step)
        with as_input_error(self.folder / str(step), _REMEDY):
            part = ocp.args.Composite(state=ocp.args.StandardRestore(_stored(like)))
            found = self._manager.restore(step, args=part).state
            return like._replace(**found)

    def restore_recalibration(self, step: int) -> Json | None:
        """Reads what `save` was given; None if it was given nothing.

        Raises:
          InputError: the checkpoint is damaged.
        """
        if not (self.folder / str(step) / _RECALIBRATION).exists():
            return None
        return read_part(self.folder / str(step), _RECALIBRATION, _REMEDY)

    def save(self, step: int, state: TrainState, recalibration: Json | None = None) -> None:
        """Starts writing a checkpoint; returns when `state` may be changed.

        Args:
          step: number of steps done.
          state: the training state.
          recalibration: JSON values that the plan of the next steps depends on; None for none.
        """
        self._last_begun = step
        if self.base is not None:
            state = state._replace(frozen={})
        items: Json = {
            "state": ocp.args.StandardSave(_stored(state)),
            "identity": ocp.args.JsonSave(self._identity | CHECKSUMS_NOTE),
        }
        if self.base is not None:
            items[BASE] = ocp.args.JsonSave(self.base._asdict())
        if recalibration is not None:
            items[_RECALIBRATION] = ocp.args.JsonSave(recalibration)
        with self._writing():
            self._manager.save(step, args=ocp.args.Composite(**items))

    def check_writing(self) -> None:
        """Checks whether writing in the background has failed, without waiting.

        Raises:
          InputError: a checkpoint could not be written.
        """
        with self._writing():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Waits until all checkpoints are on disk.

        Raises:
          InputError: a checkpoint could not be written.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until all checkpoints are on disk, and ends their threads.

        Raises:
          InputError: a checkpoint could not be written.
        """
        self.wait()
        self._manager.close()

    def _writing(self) -> AbstractContextManager[None]:
        """Converts errors of Orbax to InputErrors."""

        def left() -> str:
            whole = self._manager.latest_step()
            return "none is whole" if whole is None else f"the newest whole one is {whole}"

        place = self.folder / str(self._last_begun)
        return as_input_error(place, "make room and run the same command again", left)


def _stored(state: TrainState) -> Json:
    """Returns the fields of a state that a checkpoint stores, those that are not empty."""
    return {name: part for name, part in state._asdict().items() if jax.tree.leaves(part)}


BEST_NAME = "best.json"
"""File in a run folder with the step and the loss of the best checkpoints, the best first."""


class Measured(NamedTuple):
    """The validation loss of a step; of equal losses, that of the earlier step is the lower."""

    loss: float
    step: int


class BestCheckpoints:
    """Saves and keeps the best checkpoints, which follow from the validations so far.

    Attributes:
      best: the best, the lowest loss first; empty where none are kept.
    """

    def __init__(self, folder: Path, count: int | None, checkpoints: Checkpoints, cluster: Cluster):
        """Keeps none before `begin`.

        Args:
          folder: of the run.
          count: number of checkpoints to keep; None for none.
          checkpoints: of the run.
          cluster: the processes of the run.
        """
        self.best: list[Measured] = []
        self._path, self._count = folder / BEST_NAME, count or 0
        self._checkpoints, self._cluster = checkpoints, cluster

    def begin(self, validations: Iterable[Measured]) -> None:
        """Goes on from the validations of earlier starts. A collective operation.

        Those without a checkpoint do not count: it was damaged, or not kept by an earlier start.
        """
        if not self._count:
            return
        saved = self._cluster.broadcast(lambda: sorted(self._checkpoints.steps()))
        self._set(each for each in validations if each.step in saved)

    def add(self, measured: Measured) -> bool:
        """Adds a validation; returns whether its checkpoint is one of the best and is to be saved.

        Of the best so far, the worst is removed when the next checkpoint is complete.
        """
        if not self._count:
            return False
        self._set([*self.best, measured])
        return measured in self.best

    def finish(self) -> None:
        """Removes what is no longer one of the best, where no further checkpoint follows.

        Raises:
          InputError: a checkpoint could not be written.
        """
        if self._count:
            self._checkpoints.remove_others()

    def _set(self, validations: Iterable[Measured]) -> None:
        self.best = sorted(validations)[: self._count]
        self._checkpoints.keep([each.step for each in self.best])
        content = [{"step": each.step, "loss": each.loss} for each in self.best]
        write_json(self._path, {"best": content})


def best_step(run_folder: Path, steps: Iterable[int]) -> int:
    """Finds the best of a run's checkpoints.

    Args:
      run_folder: folder of the run.
      steps: steps of its complete checkpoints.

    Raises:
      InputError: the run keeps no best checkpoint, or the file that names it is damaged.
    """
    path = run_folder / BEST_NAME
    content = read_json(path)
    if content is None:
        raise InputError(
            f"{path}: no such file; the run keeps no best checkpoint, which validation and "
            "checkpoint.keep_best do. Name a step"
        )
    try:
        named = [int(entry["step"]) for entry in content["best"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a list of steps and losses; name a step") from error
    available = set(steps)
    if not (found := [step for step in named if step in available]):
        raise InputError(f"{path}: names no checkpoint that is complete; name a step")
    return found[0]
