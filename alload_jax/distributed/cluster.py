"""The processes of a run as one of them sees them: how they exchange values, and notice a loss.

A signal reaches the processes at different moments, and only one process reads a given record.
Before each step every process submits what it knows to a small all-reduce. The devices compute it
during the step before, and its result is read when the step is due. So no process waits, and all
processes get the same result for the same step.

A heartbeat detects that a process of the run is lost or has failed, and ends this one with a clear
message. Without it the remaining processes would wait in their next collective: on GPUs forever.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Event, Thread
from types import TracebackType
from typing import Literal, NamedTuple, NoReturn, Self, TypeVar, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alload_jax.distributed.coordination import (
    SERVICE_ENDED_IT,
    SERVICE_FAILED,
    KeyValueStore,
    ProcessInfo,
    Seal,
)
from alload_jax.errors import (
    USER_ERRORS,
    InputError,
    LostConnectionError,
    print_stderr,
    reason_of,
    run_command,
)
from alload_jax.files import parse_json
from alload_jax.processes import FOR_OTHERS, has_ended, process_name, waits
from alload_jax.sharding.mesh import AXES, processes_of, replicated

T = TypeVar("T")


def first_process() -> bool:
    """Whether this process prints and writes files: process 0, or the only process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


class Cluster:
    """The processes of the run; most runs have a single one.

    Use it in a `with` statement. If an error leaves the `with`, the process prints the error and
    exits at once: a regular exit of Python would make JAX wait for the other processes.

    Attributes:
      num_processes: number of processes of the run.
      process_id: number of this one.
      store: what they share; None for a single process.
      heartbeat: finds lost processes and tells the others of this one; None for a single process.
      calls: number of collective operations so far.
    """

    def __init__(
        self, process: ProcessInfo | None = None, lost_after: float = 30.0, seal: Seal | None = None
    ):
        """Call it after `connect`, with a seal; without `process` there is a single process."""
        self.num_processes = process.num_processes if process else 1
        self.process_id = process.process_id if process else 0
        self.store: KeyValueStore | None = None
        self.heartbeat: Heartbeat | None = None
        if process and seal:
            self.store = KeyValueStore(seal)
            self.heartbeat = Heartbeat(self.store, process, lost_after)
        self.calls = 0
        self._status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.heartbeat is None:
            return
        if error is not None:
            self.heartbeat.report_failure(error)
            status = _print_error(error) if self._status is None else self._status
            self.heartbeat.exit_process(status)
        self.all_gather(None)
        self.all_gather(None)  # one that answered early may have been killed as it waited
        self.heartbeat.close()
        jax.distributed.shutdown()

    @contextmanager
    def report_failures(self) -> Iterator[None]:
        """Reports an error to the other processes and to the user before cleanup can block."""
        try:
            yield
        except BaseException as error:
            if self.heartbeat:
                self.heartbeat.report_failure(error)
                self._status = _print_error(error)
            raise

    def broadcast(self, compute: Callable[[], T]) -> T:
        """Calls `compute` in process 0 and returns its result in all processes.

        A collective operation: the other processes wait for process 0. The result is a JSON value.
        """
        if self.store is None:
            return compute()
        self.calls += 1
        key = f"broadcast/{self.calls}"
        if self.process_id == 0:
            self.store.put(key, json.dumps(compute()))
        return json.loads(self.store.wait_for(key))

    def all_gather(self, value: T) -> list[T]:
        """Returns the values of all processes, ordered by process. Values are JSON values.

        A collective operation: all processes wait for the last.
        """
        if self.store is None:
            return [value]
        self.calls += 1
        prefix = f"all_gather/{self.calls}"
        self.store.put(f"{prefix}/{self.process_id}", json.dumps(value))
        keys = [f"{prefix}/{process}" for process in range(self.num_processes)]
        return [json.loads(self.store.wait_for(key)) for key in keys]

    def shares(self, folder: Path | None) -> bool:
        """Whether all processes see one folder, or all name none. A collective operation.

        Process 0 creates it if necessary, and for a moment a file in it, for which the others look.
        """
        if self.store is None:
            return True
        with ExitStack() as stack:
            name = ""
            with suppress(OSError):  # then nobody looks for it
                if folder and self.process_id == 0:
                    folder.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(NamedTemporaryFile(prefix=".shared-", dir=folder))
                    name = Path(file.name).name
            return all(self.all_gather(_sees(folder, self.broadcast(lambda: name))))

    def require_same(self, values: Mapping[str, object], remedy: str) -> None:
        """Checks that all processes have the same values. A collective operation.

        Args:
          values: JSON values by name.
          remedy: what the user should do if they differ.

        Raises:
          InputError: a process has another value than process 0, or another number of processes.
        """
        expected = self.broadcast(lambda: self.num_processes)
        if expected != self.num_processes:
            raise InputError(
                f"cluster.processes is {self.num_processes}, but {expected} in process 0; start "
                "all processes with the same number"
            )
        first, *others = self.all_gather(values)
        for process, theirs in enumerate(others, 1):
            for name in sorted(first.keys() | theirs.keys()):
                value, wanted = theirs.get(name), first.get(name)
                if value != wanted:
                    raise InputError(
                        f"process {process} of {self.num_processes}: {name} is {value!r}, but "
                        f"{wanted!r} in process 0; {remedy}"
                    )


_SEEN_SECONDS = 10.0
"""How long a network file system may take to show a new file to other hosts."""


def _sees(folder: Path | None, name: str) -> bool:
    """Whether a folder shows a file of this name in time; without one, whether there is none."""
    end = time.monotonic() + _SEEN_SECONDS
    while folder and name:
        with suppress(OSError):
            if name in os.listdir(folder):  # of which NFS asks the server
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return not folder and not name


def _print_error(error: BaseException) -> int:
    """Prints an error as a command does; returns the exit status."""
    if not isinstance(error, USER_ERRORS):
        traceback.print_exception(error)
        return 1

    def fail(_: list[str]) -> NoReturn:
        raise error

    return run_command(fail, sys.argv)


class Decision(NamedTuple):
    """What all processes know of a step.

    Attributes:
      problems: damaged records of the step, read by any process, one text each.
      signal: number of a reason to stop, such as a signal, that some process had before the step;
        0 for none.
      save: whether some process wanted a checkpoint after the step.
    """

    problems: tuple[str, ...]
    signal: int
    save: bool


@waits(FOR_OTHERS)
class Consensus:
    """Takes decisions together with the other processes of the cluster, if there are any."""

    def __init__(
        self,
        cluster: Cluster,
        mesh: Mesh,
        signal: Callable[[], int] = lambda: 0,
        wants_save: Callable[[], bool] = lambda: False,
    ):
        """Decides for the steps of a run.

        Args:
          cluster: the processes.
          mesh: all devices.
          signal: returns the number of this process's reason to stop, such as a signal, or 0.
          wants_save: returns whether this process wants a checkpoint.
        """
        self._cluster, self._signal, self._wants_save = cluster, signal, wants_save
        self._prefix = f"problems/{cluster.calls}"  # a second run has steps of these numbers too
        self._row_sharding = NamedSharding(mesh, PartitionSpec(AXES))
        self._num_rows = processes_of(mesh).count(jax.process_index())
        self._max = jax.jit(lambda rows: rows.max(axis=0), out_shardings=replicated(mesh))

    def submit(self, step: int, problems: tuple[str, ...]) -> Callable[[], Decision]:
        """Submits what this process knows of a step. Does not wait; a collective operation.

        Returns:
          A function that gives the decision, once the step is due; it waits for its all-reduce.
        """
        save, store, heartbeat = self._wants_save(), self._cluster.store, self._cluster.heartbeat
        if store is None or heartbeat is None:
            return lambda: Decision(problems, self._signal(), save)
        if problems:
            store.put(f"{self._prefix}/{step}/{self._cluster.process_id}", json.dumps(problems))
        row = np.array([[len(problems), self._signal(), save]], np.int32)
        rows = jax.make_array_from_process_local_data(
            self._row_sharding, row.repeat(self._num_rows, axis=0)
        )
        maximum = self._max(rows)

        @waits(FOR_OTHERS)
        def decision() -> Decision:
            heartbeat.step = step + 1
            damaged, signal, wanted = np.asarray(maximum).tolist()
            found = store.get_prefix(f"{self._prefix}/{step}") if damaged else {}
            texts = [text for n in sorted(found, key=int) for text in json.loads(found[n])]
            return Decision(tuple(dict.fromkeys(texts)), signal, bool(wanted))

        return decision

    def signal(self) -> int:
        """Returns the largest number of a reason to stop of all processes; waits for all."""
        return max(self._cluster.all_gather(self._signal()))


_GRACE = 5.0
"""Seconds after another process's failure in which this one may fail of the same and report it."""


State = Literal["running", "unconfirmed", "failed", "exited"]


@dataclass
class Message:
    """What a process publishes about itself at every interval.

    Attributes:
      host: name of its host.
      sequence: number of the message; a new number proves that the process is alive.
      state: `running`; `unconfirmed`: it has an error that another process's loss may have caused;
        `failed`: the error is its own; `exited`.
      reason: of the error, in one line.
      step: the step that the process is at, from 1; 0 before the first.
      waiting: what it has waited for unusually long, apart from the other processes.
      process: its `process_name`.
    """

    host: str
    sequence: int = 0
    state: State = "running"
    reason: str = ""
    step: int = 0
    waiting: str = ""
    process: str = ""


_LONGEST_MESSAGE = 10_000


def parse_message(text: str) -> Message | None:
    """Reads a message of another process; None if it is malformed."""
    try:
        fields = parse_json(text, "", "") if len(text) <= _LONGEST_MESSAGE else None
    except InputError:
        return None
    if not isinstance(fields, dict):
        return None
    usual = vars(Message(""))
    known = {name: fields[name] for name in usual.keys() & fields.keys()}
    typed = all(type(value) is type(usual[name]) for name, value in known.items())
    if not typed or "host" not in known or known.get("state", "running") not in get_args(State):
        return None
    return Message(**known)


@dataclass
class _Received:
    """The newest message of a process; times are of this process's monotonic clock, in seconds.

    Attributes:
      message: the message.
      at: when it arrived.
      failed_at: when the first message that reports a failure or exit arrived.
      ended_at: when it was first seen that it runs no more; only processes of this host can be.
    """

    message: Message
    at: float
    failed_at: float | None = None
    ended_at: float | None = None


class Heartbeat:
    """Two threads: one exchanges messages through process 0, the other checks for lost processes.

    Attributes:
      step: the current step, from 1; 0 before the first.
      waiting: what this process has waited for unusually long, apart from the other processes.
      remedy: returns the advice to print when a process is lost.
    """

    def __init__(self, store: KeyValueStore, process: ProcessInfo, lost_after: float):
        """Starts both threads.

        A process counts as lost after `lost_after` seconds of silence, and one of this host that
        has ended without a word much earlier.
        """
        self.step, self.waiting = 0, ""
        self.remedy: Callable[[], str] = lambda: "start all processes again"
        self._store, self._process, self._lost_after = store, process, lost_after
        self._interval = min(2.0, lost_after / 8)
        self._message = Message(socket.gethostname(), process=process_name())
        now = time.monotonic()
        self._received = {
            n: _Received(Message("host unknown"), now) for n in range(process.num_processes)
        }
        self._store_answered_at = now
        self._closed = Event()
        loops = (self._exchange_loop, self._check_loop)
        self._threads = [Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops both threads, after all processes have finished."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def report_failure(self, error: BaseException) -> None:
        """Reports to the other processes that this one has failed.

        An error that the loss of another process may have caused is held back until that is
        decided. If another process is lost or has failed, this function does not return: the check
        ends the process with a message that names the other one.
        """
        if self._message.state == "exited":  # the check has found it, and is about to end this one
            Event().wait()
        if self._message.state != "running":
            return
        self._message.reason = reason = reason_of(error)
        if not isinstance(error, USER_ERRORS) or isinstance(error, LostConnectionError):
            self._message.state = "unconfirmed"
            # If another process failed for another reason, the check ends this one meanwhile.
            seconds = self._lost_after + 4 * self._interval
            self._wait_for_others(
                lambda other: other.state == "unconfirmed" or other.reason == reason, seconds
            )
        self._message.state = "failed"

    def exit_process(self, status: int) -> NoReturn:
        """Ends this process, which has failed. Process 0, which hosts the store, exits last."""
        if self._process.process_id == 0:
            self._wait_for_others(self._is_gone, self._lost_after)
        else:
            self._message.state = "exited"
            if not SERVICE_FAILED.is_set():  # its client would not answer
                self._exchange()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def held_up_by(self) -> str:
        """Names the other processes that hold this one up; "" if none is known to."""
        found = []
        for number, received in self._received.items():
            message = received.message
            if number != self._process.process_id and (
                message.step < self.step or (message.waiting and not self.waiting)
            ):
                waits = f", and waits {message.waiting}" if message.waiting else ""
                found.append(f"{self._describe(number)} is at step {message.step}{waits}")
        return ", ".join(found)

    def give_up(self, reason: str) -> None:
        """Reports that this process ends for a reason; first lets one that holds it up say so.

        If another process has failed, the check ends this one meanwhile with its reason.
        """
        self._exchange()  # it may have failed since the last time
        own = self._received[self._process.process_id]
        failed = [found for found in self._received.values() if found.failed_at is not None]
        if self.held_up_by() or any(found is not own for found in failed):
            time.sleep(2 * _GRACE + 2 * self._interval)
        self._message.state, self._message.reason = "failed", reason
        self._exchange()

    def _wait_for_others(self, condition: Callable[[Message], bool], seconds: float) -> None:
        """Waits until the condition holds for all other processes, at most for some seconds."""
        end = time.monotonic() + seconds
        others = [found for n, found in self._received.items() if n != self._process.process_id]
        while not all(condition(other.message) for other in others) and time.monotonic() < end:
            time.sleep(self._interval / 2)

    def _exchange_loop(self) -> None:
        while not self._closed.is_set():
            self._exchange()
            self._closed.wait(self._interval)

    def _exchange(self) -> None:
        """Publishes this process's message and reads those of all processes."""
        try:
            self._message.sequence += 1
            self._message.step, self._message.waiting = self.step, self.waiting
            own = json.dumps(asdict(self._message))
            self._store.put(f"heartbeat/{self._process.process_id}", own)
            texts = self._store.get_prefix("heartbeat")
        except jax.errors.JaxRuntimeError:
            return  # the store does not answer; the check measures for how long
        self._store_answered_at = time.monotonic()
        for number, text in texts.items():
            if not number.isdecimal() or int(number) not in self._received:
                continue  # started with a larger cluster.processes; Cluster.require_same reports it
            received, message = self._received[int(number)], parse_message(text)
            if message is None:
                continue  # not of this program; silence will tell
            if message.sequence > received.message.sequence:  # no old one that a stranger repeats
                received.message, received.at = message, self._store_answered_at
            if message.state in ("failed", "exited") and received.failed_at is None:
                received.failed_at = self._store_answered_at

    def _check_loop(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self._interval / 2):
            pause, last = time.monotonic() - last, time.monotonic()
            if failure := self._find_suspension(pause) or self._find_failure():
                self._message.state, self._message.reason = "exited", failure
                try:
                    print_stderr(f"error: {failure}; {self.remedy()}")
                finally:  # stderr may be closed, for example because its reader has ended
                    # Process 0, which exits last, need not wait for this one.
                    announcement = Thread(target=self._exchange, daemon=True)
                    announcement.start()
                    announcement.join(self._interval)  # longer where process 0 does not answer
                    if self._process.process_id == 0:  # other hosts notice a loss later
                        self._wait_for_others(self._is_gone, 2 * self._interval)
                    os._exit(1)

    def _is_gone(self, other: Message) -> bool:
        return other.state == "exited" or has_ended(other.process, self._message.process)

    def _find_suspension(self, pause: float) -> str:
        """Describes a suspension of this process that the others take for its loss; or "".

        Args:
          pause: seconds since the last check, which received no messages meanwhile.
        """
        if pause <= self._lost_after:
            return ""
        own = self._describe(self._process.process_id)
        return f"{own} was suspended for {pause:.0f} seconds{self._at_step()} and counts as lost"

    def _find_failure(self) -> str:
        """Describes the loss or failure of a process that must end this one; or ""."""
        now, ends = time.monotonic(), self._message.state in ("failed", "exited")
        for number, received in self._received.items():
            message = received.message
            told = message.state in ("failed", "exited")  # why it ends, which is said below
            if told or not has_ended(message.process, self._message.process):
                continue
            if received.ended_at is None:
                received.ended_at = now
            come = number == 0 or self._store_answered_at > received.ended_at  # its last message
            if come and now - received.ended_at > 2 * self._interval:
                return f"{self._describe(number)} was lost{self._at_step()}"
        if SERVICE_FAILED.is_set() and not ends:
            return f"{SERVICE_ENDED_IT}{self._at_step()}"
        if now - self._store_answered_at > self._lost_after:
            return f"{self._describe(0)} was lost{self._at_step()}"
        # While process 0 does not answer, silence of the others proves nothing.
        store_answers = now - self._store_answered_at <= self._lost_after / 2
        for number, received in self._received.items():
            silent = now - received.at > self._lost_after
            if store_answers and silent and received.message.state != "exited":
                return f"{self._describe(number)} was lost{self._at_step()}"
        for number, received in self._received.items():
            failed_at = received.failed_at
            if not ends and failed_at is not None and now - failed_at > _GRACE:
                reason = received.message.reason
                return f"{self._describe(number)} ended{self._at_step()}: {reason}"
        return ""

    def _describe(self, number: int) -> str:
        host = self._received[number].message.host
        return f"process {number} of {self._process.num_processes} ({host})"

    def _at_step(self) -> str:
        return f" at step {self.step}" if self.step else " before the first step"
