"""Ends a run that makes no progress, and says what it waits for."""

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import jax
from typing_extensions import override

from alload_jax.data.loader import PlacedStep
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import print_stderr
from alload_jax.files import open_regular
from alload_jax.processes import FOR_OTHERS, waiting_for
from alload_jax.training import WatchdogConfig
from alload_jax.training.loop import Callback, Loop
from alload_jax.training.signals import StopRequest, stop_name

_RECENT_STEPS = 33
_WARN_AT = 0.25
"""Share of the time until the end after which a warning says what the run waits for."""
_STOP_SECONDS, _STOP_STEPS = 60.0, 3.0
"""How long a run that is asked to stop may make no progress: seconds, or usual steps."""
_SUSPENDED = 5.0
"""Factor of the interval of checks beyond which the process itself was suspended."""


class Watchdog(Callback):
    """A thread that watches a run, from the reading of its data until it is saved.

    Use it in a `with` statement around all of that. What comes before the first step may take as
    long as work between steps.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        folder: Path,
        cluster: Cluster,
        stop: StopRequest,
        remedy: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], None] = os._exit,
    ):
        """Watches the thread that creates it.

        Args:
          config: how long it waits.
          folder: folder of the run, for the stacks of all threads.
          cluster: the processes, which learn that this one has failed.
          stop: whether the run is asked to stop.
          remedy: returns how to continue the run.
          clock: seconds.
          end: ends the process with a status.
        """
        self._config, self._folder, self._cluster = config, folder, cluster
        self._stop, self._remedy, self._clock, self._end = stop, remedy, clock, end
        self._watched = threading.get_ident()
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._step, self._since, self._pausing, self._warned = 0, clock(), True, False
        self._starting = True
        self._closed = threading.Event()
        limits = (config.step_seconds, config.pause_seconds, _STOP_SECONDS)
        self._interval = min(limits) / 60

    def __enter__(self) -> Self:
        if self._config.step_factor is not None:
            threading.Thread(target=self._loop, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    @override
    def on_start(self, run: Loop) -> None:
        self._step, self._pausing, self._starting = run.done, False, False
        self.progress()

    @override
    def on_step_end(self, run: Loop, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        self._seconds.append(self._clock() - self._since)
        self._step = run.done
        self.progress()

    @override
    def on_pause(self, run: Loop) -> None:
        self._pausing = True
        self.progress()

    @override
    def on_resume(self, run: Loop) -> None:
        self._pausing = False
        self.progress()

    on_stop = on_pause  # saving counts as a pause

    @override
    def on_finish(self, run: Loop) -> None:
        """Everything is saved, and the rest may take its time."""
        self._closed.set()

    def progress(self) -> None:
        """Notes that the run is not stalled."""
        self._since, self._warned = self._clock(), False
        if self._cluster.heartbeat:
            self._cluster.heartbeat.waiting = ""

    def limit(self) -> float:
        """Seconds without progress after which the run is ended."""
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        steps = max(self._config.step_seconds, (self._config.step_factor or 0.0) * usual)
        if self._pausing:
            return max(steps, self._config.pause_seconds)
        return min(steps, max(_STOP_SECONDS, _STOP_STEPS * usual)) if self._stop else steps

    def _loop(self) -> None:
        last = self._clock()
        while not self._closed.wait(self._interval):
            passed, last = self._clock() - last, self._clock()
            if passed > _SUSPENDED * self._interval:  # nothing could progress meanwhile
                self._since += passed
            self.check()

    def check(self) -> None:
        """Warns, or ends the process, if the run has made no progress for too long."""
        waited, limit = self._clock() - self._since, self.limit()
        if waited > limit:
            self._give_up(waited)
            return
        # A start is told as soon as a step would be, though it may take longer.
        until = min(limit, self._config.step_seconds) if self._starting else limit
        if waited > _WARN_AT * until and not self._warned:
            self._warned = True
            print_stderr(f"warning: {self._stall(waited)}; the run ends after {limit:.0f} s")

    def _stall(self, waited: float) -> str:
        words, others = waiting_for(sys._current_frames().get(self._watched)), ""
        if heartbeat := self._cluster.heartbeat:
            heartbeat.waiting = "" if words == FOR_OTHERS else words
            others = heartbeat.held_up_by()
        usual = ""
        if self._seconds and not self._pausing:
            usual = f" (usually {statistics.median(self._seconds):.3g} s)"
        when = "before the first step" if self._starting else f"after step {self._step}"
        return (
            f"no progress for {waited:.0f} s{usual} {when}: it waits {words}"
            f"{others and f'; {others}'}"
        )

    def _give_up(self, waited: float) -> None:
        reason = self._stall(waited)
        if self._stop:
            reason = f"{stop_name(self._stop.number)}: the run cannot save: {reason}"
        try:
            path = self._folder / stacks_name(self._cluster.process_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_regular(path, "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            reason += f"; the stacks of all threads are in {path}"
        except OSError as error:  # a storage that does not answer may be what is waited for
            reason += f"; the stacks cannot be written ({error.strerror})"
        try:
            if self._cluster.heartbeat:
                self._cluster.heartbeat.give_up(reason)
            print_stderr(f"error: {reason}; {self._remedy()}")
        finally:
            self._end(1)


def stacks_name(process: int) -> str:
    """Name of the file in the run folder with the stacks of a stalled process's threads."""
    return f"stalled-{process}.txt" if process else "stalled.txt"
