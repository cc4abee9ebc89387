"""Ctrl-C, SIGTERM and other reasons to stop: finish the step, save, end."""

import signal
from types import FrameType, TracebackType
from typing import Self

TIME_LIMIT = 255
"""A reason to stop that is no signal; signals have smaller numbers."""


def stop_name(number: int) -> str:
    """`SIGTERM` or `time limit`, for messages."""
    return "time limit" if number == TIME_LIMIT else signal.Signals(number).name


class StopRequest:
    """Catches SIGINT and SIGTERM while open; a second one ends the program at once.

    A SIGINT that is ignored at the start stays ignored: a shell script starts its background jobs
    so, to keep them from the Ctrl-C that is meant for the script.

    Attributes:
      number: of the signal that came, or of another reason to stop; 0 for none.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return bool(self.number)

    def __enter__(self) -> Self:
        numbers = [number for number in self._SIGNALS if not _ignored_interrupt(number)]
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._restore()

    def request(self, number: int) -> None:
        """Asks for a stop, unless one has been asked for already."""
        self.number = self.number or number

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        print(
            f"\n{signal.Signals(number).name}: finishing and saving; once more to quit at once",
            flush=True,
        )
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _ignored_interrupt(number: int) -> bool:
    return number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN
