"""The interface of trackers, their registry, and TensorBoard."""

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from PIL import Image
from typing_extensions import override

from alload_jax.distributed.cluster import first_process
from alload_jax.registry import Registry
from alload_jax.sampling.pictures import encode_gif, read_frames

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


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
    config: Mapping[str, object]


class TrackerConfig(Protocol):
    """A frozen dataclass whose fields are a tracker's config; `name` is its name in the config."""

    def check(self) -> None:
        """Raises InputError if the tracker cannot work here, before the run begins."""
        ...

    def make(self, context: TrackerContext) -> Tracker:
        """Builds the tracker."""
        ...


class Trackers(Tracker):
    """A `Tracker` of several, or of none."""

    def __init__(self, configs: Sequence[TrackerConfig], context: TrackerContext):
        self._trackers = [config.make(context) for config in configs]

    @override
    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    @override
    def show(self, step: int, name: str, path: Path) -> None:
        for tracker in self._trackers:
            tracker.show(step, name, path)

    @override
    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


TRACKERS: Registry[type[Any]] = Registry(
    "tracker",
    {
        "tensorboard": "alload_jax.training.trackers:TensorBoardConfig",
        "wandb": "alload_jax.training.trackers.services:WandbConfig",
        "mlflow": "alload_jax.training.trackers.services:MlflowConfig",
        "trackio": "alload_jax.training.trackers.services:TrackioConfig",
    },
)
"""Config classes, each a `TrackerConfig`, that `trackers` in the config can name."""


_SHOWN = (".png", ".gif")
"""What a browser shows as an image, clips included."""
_CONVERTED = (".mp4",)


@dataclass(frozen=True)
class TensorBoardConfig(TrackerConfig):
    """Writes TensorBoard events to `tensorboard/` in the run folder.

    Attributes:
      name: `tensorboard`.
    """

    name: Literal["tensorboard"] = "tensorboard"

    @override
    def check(self) -> None:
        """It works everywhere."""

    @override
    def make(self, context: TrackerContext) -> Tracker:
        return TensorBoard(context.folder / "tensorboard", context.resumed_at)


class TensorBoard(Tracker):
    """A `Tracker` that writes event files to a folder.

    Events of steps after `resumed_at` come from a run that was interrupted after its last
    checkpoint; TensorBoard drops them, because the resumed run writes them again.
    """

    def __init__(self, folder: Path, resumed_at: int):
        self._folder = folder
        self._purge: int | None = resumed_at + 1
        self._writer: SummaryWriter | None = None
        self._files = 0
        if first_process():  # seconds where PyTorch is installed, as the first step takes
            Thread(target=import_module, args=("tensorboardX",)).start()

    @override
    def log(self, step: int, values: Mapping[str, float]) -> None:
        if first_process():
            for name, value in values.items():
                self._opened().add_scalar(name, value, step)

    @override
    def show(self, step: int, name: str, path: Path) -> None:
        """Other files than .png, .gif and .mp4 are not shown."""
        suffix = path.suffix.lower()
        if not first_process() or suffix not in (*_SHOWN, *_CONVERTED):
            return
        from tensorboardX.proto.summary_pb2 import Summary

        content = path.read_bytes() if suffix in _SHOWN else encode_gif(*read_frames(path))
        with Image.open(io.BytesIO(content)) as picture:
            width, height = picture.size
        image = Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=content
        )
        summary = Summary(value=[Summary.Value(tag=name, image=image)])
        self._opened().file_writer.add_summary(summary, step)

    @override
    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):  # a full disk must not end a run here: metrics.jsonl says it
                self._writer.close()
            self._writer = None

    def _opened(self) -> "SummaryWriter":
        if self._writer is None:
            from tensorboardX import SummaryWriter

            suffix = f".{self._files}"  # names of files hold whole seconds
            self._writer = SummaryWriter(
                str(self._folder),
                purge_step=self._purge,
                max_queue=0,  # without a limit: a thread that has failed takes nothing from it
                filename_suffix=suffix,
            )
            self._purge, self._files = None, self._files + 1
        return self._writer
