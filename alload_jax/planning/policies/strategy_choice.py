"""Which of several strategies a window tries."""

from collections.abc import Sequence

_CLOSE, _RETRY = 0.02, 8
"""A strategy that was this much slower is tried again only in every eighth window."""


class StrategyChoice:
    """Which strategies are worth trying: those that were best, or close to it."""

    def __init__(self) -> None:
        self._windows = 0
        self._found: dict[str, float] = {}

    def to_try(self, known: Sequence[str]) -> list[str]:
        """Those of the known strategies that the next window should try."""
        self._windows += 1
        if self._windows % _RETRY == 1 or not set(known) <= set(self._found):
            return list(known)
        least = max(self._found[strategy] for strategy in known) * (1 - _CLOSE)
        return [strategy for strategy in known if self._found[strategy] >= least]

    def note(self, strategy: str, efficiency: float) -> None:
        """Notes how good the strategy was in the last window that tried it."""
        self._found[strategy] = efficiency
