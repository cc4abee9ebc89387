"""Progress of a run on the terminal."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """A progress bar on a terminal; otherwise a plain line every ten seconds and at the end."""

    def __init__(self, title: str, total: int, done: int = 0, console: Console | None = None):
        """Starts at `done` of `total`."""
        self._console = console or Console(file=sys.stdout)
        self._title, self._total, self._done = title, total, done
        self._first, self._began = done, time.monotonic()
        self._last_line = self._began
        self._live: Progress | None = None
        if self._console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("·"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self._console,
            )
            self._task = self._live.add_task(title, total=total, completed=done, note="")

    def start(self) -> Self:
        """Shows the bar."""
        self._began = self._last_line = time.monotonic()
        if self._live:
            self._live.start()
        return self

    def stop(self, *_: object) -> None:
        """Removes the bar from the terminal's live area."""
        if self._live:
            self._live.stop()

    __enter__, __exit__ = start, stop

    def advance(self, note: str) -> None:
        """Advances by one step; `note` is shown beside the progress."""
        self._done += 1
        if self._live:
            self._live.update(self._task, completed=self._done, note=note)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._last_line = now
            each = (now - self._began) / (self._done - self._first)
            left = round(each * (self._total - self._done))
            self.say(f"{self._title} {self._done}/{self._total} · {note} · {left} s left")

    def skip(self, steps: int) -> None:
        """Advances by steps that were done before, which count for no speed."""
        self._done += steps
        self._first += steps
        if self._live:
            self._live.reset(self._task, completed=self._done)

    def say(self, text: str) -> None:
        """Prints a line without disturbing the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
