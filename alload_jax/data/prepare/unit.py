"""One unit of work: some input files become one shard, encoded here or by another process."""

import json
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import SpawnContext
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module

from alload_jax.data import record as records
from alload_jax.data.prepare import sources
from alload_jax.data.prepare.captions import clean
from alload_jax.data.prepare.encoders import Given, GivenFrames
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.prepare.videos import video_clips
from alload_jax.data.prepare.work_folder import PREVIEWS, Skipped, UnitReport, preview, write_report
from alload_jax.data.store import ShardWriter
from alload_jax.encoders.loading import Encoded, TextEncoder, VaeEncoder, device_count
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.planning.samples import Triple
from alload_jax.processes import follow_parent


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defers Ctrl-C to the end, where it raises KeyboardInterrupt.

    For starting and stopping other processes, which leaves them or this one in disorder if it is
    interrupted. Processes that are started do not hear Ctrl-C: this process ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    # Handlers of Python are not inherited, but the mask is.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
    if pending:
        raise KeyboardInterrupt


@contextmanager
def encoding_processes(job: "Job", context: SpawnContext) -> Iterator[list[Any]]:
    """Starts a process for each GPU, or one where there is none; ends them at the end.

    Yields:
      proxies of their `Encoders`.
    """
    managers: list[_Manager] = []
    try:
        for device in _devices():
            manager = _Manager(ctx=context)
            with deferred_interrupts():
                manager.start(_begin, (device,))
                managers.append(manager)
        yield [manager.Encoders(job) for manager in managers]
    finally:
        with deferred_interrupts(), ExitStack() as stack:
            for manager in managers:
                stack.callback(manager.shutdown)


def _devices() -> list[str | None]:
    """The value of CUDA_VISIBLE_DEVICES for each process."""
    count = device_count()
    if count < 2:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(visible.split(",")[:count]) if visible else [str(number) for number in range(count)]


def _begin(device: str | None) -> None:
    """Begins an encoding process; PyTorch is imported later and sees this GPU alone."""
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    follow_parent()


class Encoders:
    """The encoders of an encoding process; a thread for each worker may call them.

    Its proxies may be pickled and sent to workers, whose calls are answered one by one. Their
    frames are sent while others are encoded.
    """

    def __init__(self, job: "Job"):
        self._job, self._lock = job, threading.Lock()

    def encode(self, name: str, method: str, *arguments: Any) -> Any:
        """Calls a method of the job's encoder of that name."""
        with self._lock:
            return self._job.call(name, method, *arguments)


ENCODING_ENDED = (
    "the process that encodes ended, perhaps for lack of memory; run the same command again, which "
    "goes on from here"
)


class _Manager(BaseManager):
    Encoders: Callable[..., Any]


_Manager.register("Encoders", Encoders, exposed=["encode"])


@dataclass(frozen=True)
class Job:
    """What all units share.

    Attributes:
      out: the data folder.
      settings: the settings.
      vae, text: the encoders.
      given: encoder of the frames that image-to-video models are given; None for none.
      remote: another process that encodes with those of them that have weights, with the method
        `encode` of `Encoders`; None for none.
    """

    out: Path
    settings: MediaSettings
    vae: VaeEncoder
    text: TextEncoder
    given: GivenFrames | None = None
    remote: Any = None

    def encode_caption(self, caption: str | None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Encodes a caption, here or remotely: the condition, and tokens of further kinds by name.

        See `TextEncoder.encode`.
        """
        found: Encoded = self.call("text", "encode", caption)
        parts = dict(found) if isinstance(found, dict) else {records.TEXT: found}
        if not all(np.isfinite(values).all() for values in parts.values()):
            raise sources.UnusableError("the text encoder gives values that are not finite")
        return parts.pop(records.TEXT), parts

    @property
    def has_weights(self) -> bool:
        """Whether other processes should encode."""
        return self.vae.has_weights or self.text.has_weights

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Calls a method of the encoder of that name, here or remotely.

        Raises:
          InputError: the other process has ended; what the encoder raises is raised here too.
        """
        encoder = getattr(self, name)
        if self.remote is None or not getattr(encoder, "has_weights", True):
            return getattr(encoder, method)(*arguments)
        try:
            return self.remote.encode(name, method, *arguments)
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            raise InputError(ENCODING_ENDED) from error

    def encoder_origins(self) -> Json:
        """What the encoders' outputs depend on, by encoder, as JSON values."""
        encoders: Json = {"vae": self.vae, "text": self.text, "image_to_video": self.given}
        return {name: each.origin() for name, each in encoders.items() if each is not None}

    def origin(self) -> Json:
        """The provenance that the manifest stores, as JSON values."""
        return json.loads(json.dumps(self.settings.origin() | self.encoder_origins()))

    @property
    def token(self) -> tuple[int, ...]:
        """Pixels along (frames, height, width) of a token."""
        return tuple(map(operator.mul, self.vae.stride, self.vae.patch_size))


def prepare_unit(
    job: Job,
    number: int,
    items: Sequence[sources.Item],
    finished: Callable[[int], None] = lambda files: None,
) -> None:
    """Writes the shard of that number and its report; they appear complete or not at all.

    Args:
      job: what all units share.
      number: number of the shard.
      items: its input files.
      finished: called after each file with the number of files that are finished.

    Raises:
      InputError: the shard cannot be written, such as to a full disk.
    """
    report = UnitReport()
    try:
        with ShardWriter(job.out, number, vae_stride=job.vae.stride, origin=job.origin()) as shard:
            for files, item in enumerate(items, 1):
                # Each of the first shards might have a sample only.
                _add_item(job, item, shard, report, PREVIEWS if number < PREVIEWS else 0)
                finished(files)
            write_report(job.out, number, report)
    except OSError as error:
        reason = error.strerror or sources.short(error)
        raise InputError(
            f"{job.out}: shard {number} cannot be written ({reason}); free disk space and run the "
            "same command again, which goes on from here"
        ) from error


def _add_item(
    job: Job,
    item: sources.Item,
    shard: ShardWriter,
    report: UnitReport,
    previews: int,
) -> None:
    """Adds the clips of a file; to the report what cannot be used, and at most so many previews."""
    before = shard.written
    captions = list(map(clean, item.captions))
    caption = captions[0] if captions else None
    changes = set() if caption else {"no caption"}
    try:
        condition, parts = job.encode_caption(caption)
        others = [(words, job.encode_caption(words)) for words in captions[1:]]
        alternatives = [(other, words, of_other) for words, (other, of_other) in others]
        can_count = hasattr(job.text, "surplus_tokens")
        for words in filter(None, captions):
            if can_count and (surplus := int(job.call("text", "surplus_tokens", words))):
                changes.add(f"caption cut, {surplus:,} tokens too long")
        content = item.content
        if item.source and not content:
            content = sources.content_of(item.source, item.own, item.copy)
        for latents, given, size, clip in _stored(item) or _encoded(job, item, changes.add):
            values = [array for array in (latents, *given) if array is not None]
            if not all(np.isfinite(array).all() for array in values):
                raise sources.UnusableError("the encoder gives values that are not finite")
            shard.add(
                latents,
                condition,
                size,
                caption or "",
                given=given.channels,
                image=given.image,
                alternatives=alternatives,
                parts=parts,
                path=item.name,
                content=content,
                weight=item.weight,
                dropout=item.dropout,
                found_captions=item.found,
            )
            if clip is not None and len(report.previews) < previews:
                report.previews.append(preview(clip))
    except sources.UnusableError as error:
        report.skipped.append(Skipped(item.name, str(error), shard.written - before))
    if clips := shard.written - before:
        report.used += 1
        report.without_caption += not caption
        notes = (Skipped(item.name, change, clips, used=True) for change in sorted(changes))
        report.skipped.extend(notes)


_Clip = tuple[np.ndarray, Given, Triple, np.ndarray | None]
"""Latents, what is given beside them, size in pixels; and the pixels, where they were decoded."""


def _stored(item: sources.Item) -> list[_Clip]:
    """What the records of a file hold beside its captions; nothing if one cannot be read."""
    found: list[_Clip] = []
    for shard, index, checksum, size in item.records:
        try:
            reader = array_record_module.ArrayRecordReader(str(shard))
            (data,) = reader.read([index])
            reader.close()
        except (RuntimeError, ValueError, IndexError):
            return []
        if records.checksum(data) != checksum:
            return []
        arrays = records.decode(data)
        given = Given(arrays.get(records.GIVEN), arrays.get(records.IMAGE))
        found.append((arrays[records.LATENTS], given, size, None))
    return found


def _encoded(job: Job, item: sources.Item, note: sources.Note) -> Iterator[_Clip]:
    for clip in _clips(job.settings, job.token, item, note):
        size, given = (len(clip), clip.shape[1], clip.shape[2]), Given(None, None)
        if job.given is not None:
            given = job.call("given", "encode", clip[0], clip[-1], len(clip))
        yield np.asarray(job.call("vae", "encode", clip)), given, size, clip


def clip_sizes(
    items: Sequence[sources.Item], settings: MediaSettings, token: Sequence[int]
) -> Iterator[tuple[sources.Item, Triple]]:
    """The file and size in pixels of each clip that `prepare_unit` would make.

    By the times in videos alone; `token` is that of `Job`.
    """
    for item in items:
        with suppress(sources.UnusableError):
            for clip in _clips(settings, token, item, times_only=True):
                yield item, (len(clip), clip.shape[1], clip.shape[2])


def _clips(
    settings: MediaSettings,
    token: Sequence[int],
    item: sources.Item,
    note: sources.Note = lambda change: None,
    times_only: bool = False,
) -> Iterator[np.ndarray]:
    settings = replace(settings, **dict(item.own)) if item.own else settings
    if item.source is None:
        raise sources.UnusableError(item.reason)
    choose = partial(sources.fit, areas=settings.areas(token), max_enlarge=settings.max_enlarge)
    is_image = sources.suffix_of(item.name) in sources.IMAGES
    if is_image and not sources.is_animated(item.source):
        yield sources.decode_image(item.source, choose, note)
        return
    yield from video_clips(item.source, choose, settings, is_image, times_only, note)
