"""The interface of trackers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Shows the figures and pictures of a run; metrics.jsonl stays their record.

    In a cluster all processes call a tracker, and only the first process writes.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the values of a step by name; steps count from 1."""
        ...

    def show(self, step: int, name: str, path: Path) -> None:
        """Shows the picture or clip of a file, such as a .png, .gif or .mp4."""
        ...

    def close(self) -> None:
        """Writes what is pending; a tracker can be used again afterwards."""
        ...
