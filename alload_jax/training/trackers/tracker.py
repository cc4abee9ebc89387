"""The interface of trackers, and a registry of the trackers that a config can name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from alload_jax.registry import Registry


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


class TrackerContext(NamedTuple):
    """Arguments for building a tracker.

    Attributes:
      folder: folder of the run.
      resumed_at: step of the checkpoint that the run continues from; 0 for a new run.
      config: every value of the run's config by dotted key.
    """

    folder: Path
    resumed_at: int
    config: Mapping[str, Any]


class TrackerConfig(Protocol):
    """A frozen dataclass whose fields are a tracker's config; `name` is its name in the config."""

    def check(self) -> None:
        """Raises InputError if the tracker cannot work here, before the run begins."""
        ...

    def make(self, context: TrackerContext) -> Tracker:
        """Builds the tracker."""
        ...


class Trackers:
    """A `Tracker` of several, or of none."""

    def __init__(self, configs: Sequence[TrackerConfig], context: TrackerContext):
        self._trackers = [config.make(context) for config in configs]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def show(self, step: int, name: str, path: Path) -> None:
        """See `Tracker.show`."""
        for tracker in self._trackers:
            tracker.show(step, name, path)

    def close(self) -> None:
        """See `Tracker.close`."""
        for tracker in self._trackers:
            tracker.close()


TRACKERS: Registry[type[Any]] = Registry(
    "tracker",
    {
        "tensorboard": "alload_jax.training.trackers.tensorboard:TensorBoardConfig",
        "wandb": "alload_jax.training.trackers.wandb:WandbConfig",
        "mlflow": "alload_jax.training.trackers.mlflow:MlflowConfig",
        "trackio": "alload_jax.training.trackers.trackio:TrackioConfig",
    },
)
"""Config classes, each a `TrackerConfig`, that `trackers` in the config can name."""
