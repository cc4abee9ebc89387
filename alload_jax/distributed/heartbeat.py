"""Notices when a process of a cluster is lost or has failed, and ends this one in plain words.

Without it the others would wait for the lost one in their next collective, without end on GPUs.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Event, Thread
from typing import Literal, NoReturn

import jax

from alload_jax.distributed.coordination import KeyValueStore, Member
from alload_jax.errors import USER_ERRORS, reason_of

_GRACE = 5.0
"""Seconds in which a process may fail of what another has failed of, and say so itself."""


@dataclass
class Beat:
    """What a process says of itself, over and over.

    Attributes:
      host: its host's name.
      count: grows with each beat.
      state: `hurt` by an error whose cause may be the loss of another; `failed` for good; `gone`.
      reason: of its failure, or of what hurt it.
    """

    host: str
    count: int = 0
    state: Literal["well", "hurt", "failed", "gone"] = "well"
    reason: str = ""


@dataclass
class _Heard:
    """The newest beat of a process, when it came, and since when the process has failed."""

    beat: Beat
    at: float
    failed_at: float | None = None


class Heartbeat:
    """Two threads: one beats and listens through process 0, the other judges by the clock.

    Attributes:
      step: the step under way, from 1; 0 before the first.
      remedy: says what to do about a lost process.
    """

    def __init__(self, board: KeyValueStore, member: Member, lost_after: float):
        """Begins to watch; `lost_after` seconds of silence a process is lost."""
        self.step = 0
        self.remedy: Callable[[], str] = lambda: "start all processes again"
        self._board, self._member, self._lost_after = board, member, lost_after
        self._interval = min(2.0, lost_after / 8)
        self._own = Beat(socket.gethostname())
        now = time.monotonic()
        self._heard = {n: _Heard(Beat("host unknown"), now) for n in range(member.processes)}
        self._answered = now
        self._closed = Event()
        self._threads = [Thread(target=run, daemon=True) for run in (self._listen, self._judge)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops watching, because all have finished."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def fail(self, error: BaseException) -> None:
        """Says that this process has failed, unless its failure is another's loss.

        Returns once that is clear; does not return if another is lost.
        """
        if self._own.state != "well":
            return
        self._own.reason = reason = reason_of(error)
        if not isinstance(error, USER_ERRORS):
            self._own.state = "hurt"
            # One that failed of something else is what this process was hurt by: the judge says so.
            patience = self._lost_after + 4 * self._interval
            self._wait(lambda other: other.state == "hurt" or other.reason == reason, patience)
        self._own.state = "failed"

    def leave(self, status: int) -> NoReturn:
        """Ends this process, which has failed; process 0 is the last to go."""
        if self._member.process == 0:
            self._wait(lambda other: other.state == "gone", self._lost_after)
        else:
            self._own.state = "gone"
            self._beat()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _wait(self, enough: Callable[[Beat], bool], seconds: float) -> None:
        """Until all others are so, or for some seconds."""
        end = time.monotonic() + seconds
        others = [heard for n, heard in self._heard.items() if n != self._member.process]
        while not all(enough(other.beat) for other in others) and time.monotonic() < end:
            time.sleep(self._interval / 2)

    def _listen(self) -> None:
        while not self._closed.is_set():
            self._beat()
            self._closed.wait(self._interval)

    def _beat(self) -> None:
        try:
            self._own.count += 1
            self._board.put(f"beat/{self._member.process}", json.dumps(asdict(self._own)))
            texts = self._board.under("beat")
        except jax.errors.JaxRuntimeError:
            return  # no answer, which the judge counts
        self._answered = time.monotonic()
        for number, text in texts.items():
            if int(number) not in self._heard:
                continue  # of one that counts more processes, and will be told so
            heard, beat = self._heard[int(number)], Beat(**json.loads(text))
            if beat.count != heard.beat.count:
                heard.beat, heard.at = beat, self._answered
            if beat.state in ("failed", "gone") and heard.failed_at is None:
                heard.failed_at = self._answered

    def _judge(self) -> None:
        judged = time.monotonic()
        while not self._closed.wait(self._interval / 2):
            stood, judged = time.monotonic() - judged, time.monotonic()
            if verdict := self._stopped(stood) or self._verdict():
                try:
                    print(f"error: {verdict}; {self.remedy()}", file=sys.stderr, flush=True)
                finally:  # whoever read the output may be gone as well
                    os._exit(1)

    def _stopped(self, seconds: float) -> str:
        """What ends this process after a pause, in which it heard of nobody; or nothing."""
        if seconds <= self._lost_after:
            return ""
        own = self._name(self._member.process)
        return f"{own} stood still for {seconds:.0f} seconds{self._when()}, and counts as lost"

    def _verdict(self) -> str:
        """What ends this process, or nothing."""
        now = time.monotonic()
        if now - self._answered > self._lost_after:
            return f"{self._name(0)} was lost{self._when()}"
        # What is known of the others is old while process 0 keeps silent.
        for number, heard in self._heard.items():
            if heard.beat.state == "gone" or now - self._answered > self._lost_after / 2:
                continue
            if now - heard.at > self._lost_after:
                return f"{self._name(number)} was lost{self._when()}"
        return self._failure_of_another(now)

    def _failure_of_another(self, now: float) -> str:
        if self._own.state in ("failed", "gone"):
            return ""
        for number, heard in self._heard.items():
            if heard.failed_at is not None and now - heard.failed_at > _GRACE:
                return f"{self._name(number)} ended{self._when()}: {heard.beat.reason}"
        return ""

    def _name(self, number: int) -> str:
        host = self._heard[number].beat.host
        return f"process {number} of {self._member.processes} ({host})"

    def _when(self) -> str:
        return f" at step {self.step}" if self.step else " before the first step"
