"""This process among those of a run, and what they tell each other."""

import json
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import jax

from alload_jax.distributed.coordination import KeyValueStore, Member
from alload_jax.distributed.heartbeat import Heartbeat
from alload_jax.errors import USER_ERRORS, InputError, run_command

T = TypeVar("T")

_APPEARS_SECONDS = 60
"""In which a file that one host has written is there for the others: NFS caches folders."""


def first_process() -> bool:
    """Whether this process is the one that prints and writes files; a lone process is."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


class Cluster:
    """This process among those of the run; in most runs there is no other.

    Leave it by `with`. If a `with` is left by an error, the process says why and ends: at its
    regular end JAX would wait for the others.
    """

    def __init__(self, member: Member | None = None, lost_after: float = 30.0):
        """After `meet`; without a member this process is alone."""
        self.processes = member.processes if member else 1
        self._process = member.process if member else 0
        self._board = KeyValueStore() if member else None
        self._watch = Heartbeat(self._board, member, lost_after) if self._board and member else None
        self._turn = 0
        self._status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._watch is None:
            return
        if error is not None:
            self._watch.fail(error)
            self._watch.leave(_explained(error) if self._status is None else self._status)
        self.all_gather(None)
        self._watch.close()
        jax.distributed.shutdown()

    @contextmanager
    def failures_reported(self) -> Iterator[None]:
        """Lets the others and the user know of an error before anything here waits for them."""
        try:
            yield
        except BaseException as error:
            if self._watch:
                self._watch.fail(error)
                self._status = _explained(error)
            raise

    def on_loss(self, remedy: Callable[[], str]) -> None:
        """What to advise when a process is lost."""
        if self._watch:
            self._watch.remedy = remedy

    def reached(self, step: int) -> None:
        """Notes the step under way, from 1."""
        if self._watch:
            self._watch.step = step

    def broadcast(self, find: Callable[[], T]) -> T:
        """What the first process finds, told to all; a JSON value. The others wait for it."""
        if self._board is None:
            return find()
        self._turn += 1
        key = f"told/{self._turn}"
        if self._process == 0:
            self._board.put(key, json.dumps(find()))
        return json.loads(self._board.wait_for(key))

    def all_gather(self, value: Any) -> list[Any]:
        """What each process has, by process; JSON values. All wait for the last."""
        if self._board is None:
            return [value]
        self._turn += 1
        self._board.put(f"gathered/{self._turn}/{self._process}", json.dumps(value))
        keys = [f"gathered/{self._turn}/{process}" for process in range(self.processes)]
        return [json.loads(self._board.wait_for(key)) for key in keys]

    def require_same(self, values: Mapping[str, Any], remedy: str) -> None:
        """Makes sure that all processes have the same; waits for all.

        Args:
          values: JSON values by name.
          remedy: what to do where they differ.

        Raises:
          InputError: a process has another value than the first, or counts other processes.
        """
        expected = self.broadcast(lambda: self.processes)
        if expected != self.processes:
            raise InputError(
                f"cluster.processes is {self.processes}, but {expected} in process 0; start all "
                "processes with the same"
            )
        first, *others = self.all_gather(values)
        for process, theirs in enumerate(others, 1):
            for name in sorted(first.keys() | theirs.keys()):
                value, expected = theirs.get(name), first.get(name)
                if value != expected:
                    raise InputError(
                        f"process {process} of {self.processes}: {name} is {value!r}, but "
                        f"{expected!r} in process 0; {remedy}"
                    )

    def require_shared(self, name: str, folder: Path) -> None:
        """Makes sure that all processes see what the first writes to a folder; waits for all.

        Args:
          name: of the folder's key in the config.
          folder: made if need be.

        Raises:
          InputError: a process doesn't see it.
          OSError: the first cannot write there.
        """
        if self.processes == 1:
            return
        mark = folder / self.broadcast(partial(_mark, folder))
        seen = self.all_gather(_appears(mark))
        if self._process == 0:
            mark.unlink()
        if False in seen:
            raise InputError(
                f"{name} is {folder}: what process 0 writes there is not there for process "
                f"{seen.index(False)} of {self.processes}; give all hosts one file system, at the "
                "same path"
            )

    def report(self, step: int, problems: tuple[str, ...]) -> None:
        """Puts down what this process has met in a step, before the others are told to look."""
        if self._board and problems:
            self._board.put(f"problems/{step}/{self._process}", json.dumps(problems))

    def reported(self, step: int) -> tuple[str, ...]:
        """What all processes have put down of a step, by process, each text once."""
        assert self._board is not None
        found = self._board.under(f"problems/{step}")
        texts = [text for process in sorted(found, key=int) for text in json.loads(found[process])]
        return tuple(dict.fromkeys(texts))


def _mark(folder: Path) -> str:
    """Writes an empty file of a new name, which it returns."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".shared-{uuid.uuid4().hex}"
    mark.touch()
    return mark.name


def _appears(mark: Path) -> bool:
    end = time.monotonic() + _APPEARS_SECONDS
    while not mark.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _explained(error: BaseException) -> int:
    """Prints an error as a command does; returns the exit status."""
    if not isinstance(error, USER_ERRORS):
        traceback.print_exception(error)
        return 1

    def fail(_: list[str]) -> NoReturn:
        raise error

    return run_command(fail, sys.argv)
