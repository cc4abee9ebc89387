"""Writes TensorBoard events: metrics as scalars, pictures and clips as images."""

import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PIL import Image

from alload_jax.distributed.cluster import first_process
from alload_jax.sampling.frames import encode_gif, read_frames
from alload_jax.training.trackers.tracker import Tracker, TrackerContext

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_SHOWN = (".png", ".gif")
"""What a browser shows as an image, clips included."""
_CONVERTED = (".mp4",)


@dataclass(frozen=True)
class TensorBoardConfig:
    """Writes TensorBoard events to `tensorboard/` in the run folder.

    Attributes:
      name: `tensorboard`.
    """

    name: Literal["tensorboard"] = "tensorboard"

    def check(self) -> None:
        """See `TrackerConfig.check`: it works everywhere."""

    def make(self, context: TrackerContext) -> Tracker:
        """See `TrackerConfig.make`."""
        return TensorBoard(context.folder / "tensorboard", context.resumed_at)


class TensorBoard:
    """A `Tracker` that writes event files to a folder.

    Events of steps after `resumed_at` come from a run that was interrupted after its last
    checkpoint; TensorBoard drops them, because the resumed run writes them again.
    """

    def __init__(self, folder: Path, resumed_at: int):
        self._folder = folder
        self._purge: int | None = resumed_at + 1
        self._writer: SummaryWriter | None = None
        self._files = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        if first_process():
            for name, value in values.items():
                self._opened().add_scalar(name, value, step)

    def show(self, step: int, name: str, path: Path) -> None:
        """See `Tracker.show`; other files than .png, .gif and .mp4 are not shown."""
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

    def close(self) -> None:
        """See `Tracker.close`."""
        if self._writer is not None:
            with suppress(OSError):  # a full disk must not end a run here: metrics.jsonl says it
                self._writer.close()
            self._writer = None

    def _opened(self) -> "SummaryWriter":
        if self._writer is None:
            from tensorboardX import SummaryWriter  # slow to import where PyTorch is installed

            suffix = f".{self._files}"  # names of files hold whole seconds
            self._writer = SummaryWriter(
                str(self._folder),
                purge_step=self._purge,
                max_queue=0,  # without a limit: a thread that has failed takes nothing from it
                filename_suffix=suffix,
            )
            self._purge, self._files = None, self._files + 1
        return self._writer
