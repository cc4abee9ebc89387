"""The checkpoints with the lowest validation loss, and the file that names them."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.files import read_json
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.run_files import write_json

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
