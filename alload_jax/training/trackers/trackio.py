"""Trackio (extra `trackio`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alload_jax.training.trackers.service import (
    PICTURES,
    InBackground,
    TrackedRuns,
    new_id,
    require_package,
)
from alload_jax.training.trackers.tracker import Tracker, TrackerContext


@dataclass(frozen=True)
class TrackioConfig:
    """Tracks the run with Trackio.

    Attributes:
      name: `trackio`.
      project: project of the run.
      run_name: name of the run; null for the run folder's name and some random digits.
      space_id: Hugging Face Space that shows the run; null for this machine (`trackio show`).
      private: whether a Space that is made for the run is private; null for the account's default.
    """

    name: Literal["trackio"] = "trackio"
    project: str = "alload"
    run_name: str | None = None
    space_id: str | None = None
    private: bool | None = None

    def check(self) -> None:
        """See `TrackerConfig.check`."""
        require_package("trackio", "trackio", "pip install -e '.[trackio]'")

    def make(self, context: TrackerContext) -> Tracker:
        """See `TrackerConfig.make`."""
        return InBackground("trackio", Trackio(self, context))


class Trackio:
    """A `Service` of Trackio.

    Trackio keeps every point. Steps that a resumed run computes again are therefore left out where
    they have been logged; their losses are the same.
    """

    def __init__(self, config: TrackioConfig, context: TrackerContext):
        self._config, self._context = config, context
        self._runs = TrackedRuns(context.folder, context.resumed_at)
        self._run: Any = None
        self._next = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Service.log`."""
        run = self._opened()
        if step >= self._next:
            run.log(dict(values), step=step)
            self._next = step + 1

    def show(self, step: int, name: str, path: Path) -> None:
        """See `Service.show`."""
        import trackio

        run = self._opened()
        kind = trackio.Image if path.suffix.lower() in PICTURES else trackio.Video
        run.log({name: kind(path)}, step=step)

    def close(self) -> None:
        """See `Service.close`."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _opened(self) -> Any:
        if self._run is None:
            import trackio

            place = f"trackio:{self._config.space_id or ''}:{self._config.project}"
            known = self._runs.known(place)
            folder = self._context.folder.absolute().name
            name = known or self._config.run_name or f"{folder}-{new_id()}"
            self._run = trackio.init(
                self._config.project,
                name=name,
                space_id=self._config.space_id,
                private=self._config.private,
                config=None if known else dict(self._context.config),
                resume="allow" if known else "never",
                embed=False,
            )
            # Where the logged steps end is said nowhere else.
            self._next = max(self._next, getattr(self._run, "_next_step", 0))
            self._runs.keep(place, self._run.name)
        return self._run
