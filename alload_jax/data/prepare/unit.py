"""One unit of work: some input files become one shard."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.data.prepare.buckets import Bucket, Fit, buckets_of, fit
from alload_jax.data.prepare.captions import clean
from alload_jax.data.prepare.clips import video_clips
from alload_jax.data.prepare.encoders import GivenEncoder, TextEncoder, VaeEncoder, sides_multiple
from alload_jax.data.prepare.images import decode_image
from alload_jax.data.prepare.remote import RemoteEncoders
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.prepare.sources import Item
from alload_jax.data.prepare.unusable import UnusableError, short
from alload_jax.data.prepare.work_folder import Skipped, UnitReport, write_report
from alload_jax.data.record import TEXT
from alload_jax.data.store import ShardWriter
from alload_jax.data.store.checks import Alternative
from alload_jax.errors import InputError


@dataclass(frozen=True)
class Job:
    """What all units share.

    Attributes:
      out: the data folder.
      settings: the settings.
      vae, text: the encoders.
      given: encoder of the frames that image-to-video models are given; None for none.
      remote: another process that encodes with those of them that have weights; None for none.
    """

    out: Path
    settings: MediaSettings
    vae: VaeEncoder
    text: TextEncoder
    given: GivenEncoder | None = None
    remote: RemoteEncoders | None = None

    def encode_frames(self, frames: np.ndarray) -> np.ndarray:
        """Encodes a clip, here or remotely; see `VaeEncoder.encode`."""
        if self.remote is not None and self.vae.has_weights:
            return self.remote.encode_frames(frames)
        return self.vae.encode(frames)

    def encode_caption(self, caption: str | None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Encodes a caption, here or remotely: the condition, and tokens of further kinds by name.

        See `TextEncoder.encode`.
        """
        if self.remote is not None and self.text.has_weights:
            found = self.remote.encode_caption(caption)
        else:
            found = self.text.encode(caption)
        if not isinstance(found, dict):
            return found, {}
        return found[TEXT], {name: array for name, array in found.items() if name != TEXT}

    def encode_given(self, clip: np.ndarray) -> dict[str, np.ndarray | None]:
        """What image-to-video models are given for a clip, by the names of `ShardWriter.add`."""
        if self.given is None:
            return {}
        encode = self.given.encode if self.remote is None else self.remote.encode_given
        found = encode(clip[0], clip[-1], len(clip))
        return {"given": found.channels, "image": found.image}

    def encoder_origins(self) -> dict[str, Any]:
        """What the encoders' outputs depend on, by encoder, as JSON values."""
        found = {"vae": self.vae.origin(), "text": self.text.origin()}
        return found if self.given is None else found | {"image_to_video": self.given.origin()}

    def areas(self) -> list[tuple[Bucket, ...]]:
        """The buckets of each area class.

        Raises:
          InputError: an area class is unknown or does not fit the encoder.
        """
        multiple = sides_multiple(self.vae)
        return [buckets_of(area, multiple) for area in self.settings.area]


def prepare_unit(
    job: Job,
    number: int,
    items: Sequence[Item],
    stopped: Callable[[], bool] = lambda: False,
    finished: Callable[[int], None] = lambda files: None,
) -> None:
    """Writes the shard of that number and its report; they appear complete or not at all.

    Args:
      job: what all units share.
      number: number of the shard.
      items: its input files.
      stopped: asked between samples; where it is true, the shard is given up.
      finished: called after each file with the number of files that are finished.

    Raises:
      InputError: the shard cannot be written, such as to a full disk.
      KeyboardInterrupt: it was given up.
    """
    report = UnitReport()
    origin = job.settings.origin() | job.encoder_origins()
    try:
        with ShardWriter(job.out, number, vae_stride=job.vae.stride, origin=origin) as shard:
            for files, item in enumerate(items, 1):
                _add_item(job, item, shard, report, stopped)
                finished(files)
            write_report(job.out, number, report)
    except OSError as error:
        raise InputError(
            f"{job.out}: shard {number} cannot be written ({error.strerror or short(error)}); free "
            "disk space and run the same command again, which goes on from here"
        ) from error


def _add_item(
    job: Job, item: Item, shard: ShardWriter, report: UnitReport, stopped: Callable[[], bool]
) -> None:
    """Adds the clips of a file; what cannot be used goes to the report."""
    before = shard.written
    caption = None if item.caption is None else clean(item.caption)
    try:
        condition, parts = job.encode_caption(caption)
        alternatives = [_alternative(job, clean(other)) for other in item.alternatives]
        for clip in _clips(job, item):
            if stopped():
                raise KeyboardInterrupt
            latents, given = _encoded(job, clip)
            shard.add(
                latents,
                condition,
                clip.shape[:3],
                caption or "",
                alternatives=alternatives,
                parts=parts,
                path=item.name,
                **given,
            )
    except UnusableError as error:
        report.skipped.append(Skipped(item.name, str(error), shard.written - before))
    if shard.written > before:
        report.used += 1
        report.without_caption += not caption


def _alternative(job: Job, caption: str) -> Alternative:
    condition, parts = job.encode_caption(caption)
    return condition, caption, parts


def _encoded(job: Job, clip: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    latents, given = job.encode_frames(clip), job.encode_given(clip)
    if not all(
        np.isfinite(array).all() for array in (latents, *given.values()) if array is not None
    ):
        raise UnusableError("the encoder gives values that are not finite")
    return latents, given


def _clips(job: Job, item: Item) -> Iterator[np.ndarray]:
    settings, areas = job.settings, job.areas()
    if item.source is None:
        raise UnusableError(item.reason)

    def choose(height: int, width: int) -> Fit:
        return fit(height, width, areas, settings.max_enlarge)

    if item.is_image:
        yield decode_image(item.source, choose)
        return
    options: dict[str, Any] = {"min_frames": settings.min_frames, "max_clips": settings.max_clips}
    options |= {"fps": settings.rate, "frames": settings.frames, "stride": settings.stride}
    options |= {"scene_threshold": settings.cut_threshold}
    yield from video_clips(item.source, choose, **options)
