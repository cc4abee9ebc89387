"""STORE.prepare: settings and reports of a preparation in work, and their summary."""

import base64
import contextlib
import fcntl
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from alload_jax.data.manifest import MANIFEST_NAME, Manifest
from alload_jax.data.store.files import partial_folder
from alload_jax.errors import InputError
from alload_jax.files import Json, read_json, replacing

_SETTINGS = "settings.json"
_WORKERS = "workers"
"""Locked by the processes that write shards."""
_SECONDS_BETWEEN_NOTES = 0.2
_SECONDS_FOR_WORKERS = 60


PREVIEWS, PREVIEW_FRAMES = 16, 6


def preview(clip: np.ndarray) -> str:
    """A preview, as in `UnitReport`, of a clip [frames, height, width, 3] uint8."""
    chosen = np.linspace(0, len(clip) - 1, min(PREVIEW_FRAMES, len(clip))).round().astype(int)
    strip, file = Image.fromarray(np.concatenate(clip[chosen], axis=1)), io.BytesIO()
    strip.thumbnail((1200, 150))
    strip.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


@dataclass(frozen=True)
class Skipped:
    """A file that cannot be used, or not to its end, or is not stored as it was.

    Attributes:
      path: the file, as `Item.name`.
      reason: why, or what was changed.
      clips: clips that were stored.
      used: whether the reason is what was changed in clips that were stored.
    """

    path: str
    reason: str
    clips: int = 0
    used: bool = False


@dataclass
class UnitReport:
    """What became of the files of a shard.

    Attributes:
      used: files of which something was stored.
      without_caption: those of them that have no caption.
      skipped: files that cannot be used, or not to their end, and what was changed in others.
      previews: of the first clips, up to `PREVIEW_FRAMES` frames side by side: PNG in base64.
      changes: of an update, what has changed in words.
    """

    used: int = 0
    without_caption: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    previews: list[str] = field(default_factory=list)
    changes: str = ""


def work_folder(out: Path) -> Path:
    """The folder of a preparation in work, beside the data folder."""
    return out.with_name(f"{out.name}.prepare")


@contextlib.contextmanager
def claimed(out: Path, flags: Json, update: bool = False) -> Iterator[None]:
    """Holds the work folder of a data folder for this process.

    Args:
      out: the data folder.
      flags: settings as JSON values, by flag; equal to those of the preparation that goes on.
      update: whether the folder may be finished, and the input files others than before.

    Raises:
      InputError: the data folder is finished or another's, another process holds it, or the
        preparation that would go on has other settings.
    """
    partial, folder = partial_folder(out), work_folder(out)
    is_store = (out / MANIFEST_NAME).is_file()
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not (empty or folder.exists() or (update and is_store)):
        add = "add --update to bring it up to date, " if is_store else ""
        raise InputError(f"{out}: exists already; {add}name another folder or remove it")
    if not (folder / _SETTINGS).exists() and partial.is_dir() and any(partial.iterdir()):
        raise InputError(f"{partial}: holds shards of another command; remove it")
    shutil.rmtree(_removed(out), ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, (folder / _WORKERS).open("w") as workers:
        other = "another process is preparing it; wait for it"
        _lock(lock, 0, f"{out}: {other}, or name another folder")
        # The workers of a process that was killed end a little later.
        other = "processes of an earlier command still write to it; end them"
        _lock(workers, _SECONDS_FOR_WORKERS, f"{out}: {other}, or name another folder")
        workers.close()
        _compare(out, folder / _SETTINGS, json.loads(json.dumps(flags)), update)
        yield


def join_workers(out: Path) -> IO[str]:
    """Marks this process as one that writes shards of `out`, as long as the file is open."""
    mark = (work_folder(out) / _WORKERS).open("w")
    fcntl.flock(mark, fcntl.LOCK_SH)
    return mark


def _lock(file: IO[str], seconds: float, refusal: str) -> None:
    """Locks a file as soon as nobody else holds it; raises an InputError after some seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= end:
                raise InputError(refusal) from error
        time.sleep(0.1)


def _removed(out: Path) -> Path:
    return out.with_name(f"{out.name}.prepare.removed")


def _compare(out: Path, path: Path, flags: Json, update: bool) -> None:
    partial = partial_folder(out)
    begun = any(out.glob("*")) or any(partial.glob("shard-*.parquet"))
    if not path.exists() or not begun:  # other settings than those of no shard do no harm
        _write(path, flags)
        return
    found = read_json(path, f"remove {path.parent}")
    if not isinstance(found, dict):
        raise InputError(f"{path}: is not a JSON object; remove {path.parent}")
    if update:  # which goes on after any preparation, with any files
        found = found | {name: flags.get(name) for name in ("files", "update")}
        _write(path, flags)
    # Other captions are other files too: the flag says more.
    order = {"update": 0, "files": 2}
    for flag in sorted(flags.keys() | found.keys(), key=lambda flag: (order.get(flag, 1), flag)):
        if found.get(flag) != flags.get(flag):
            remedy = f"remove {path.parent} and {partial} to start again"
            if flag == "update":
                raise InputError(f"{out}: an update of it was interrupted; add --update to go on")
            if flag == "files":
                raise InputError(
                    f"{out}: was begun with other input files or captions; add --update to go on "
                    f"with these, or {remedy}"
                )
            raise InputError(
                f"{out}: was begun with {flag} {_words(found.get(flag))}, not "
                f"{_words(flags.get(flag))}; give the same, or {remedy}"
            )


def _words(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "on", False: "off"}[value]
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def write_report(out: Path, number: int, report: UnitReport) -> None:
    """Writes the report of a shard."""
    _write(work_folder(out) / f"report-{number:05d}.json", asdict(report))


def read_reports(out: Path) -> dict[int, UnitReport]:
    """The reports of the shards that have one, by number, in order."""
    reports: dict[int, UnitReport] = {}
    numbered = ((int(path.stem[7:]), path) for path in work_folder(out).glob("report-*.json"))
    for number, path in sorted(numbered):
        with contextlib.suppress(InputError):  # one that is not whole is none
            found = read_json(path)
            skipped = [Skipped(**row) for row in found.pop("skipped")]
            reports[number] = UnitReport(**found, skipped=skipped)
    return reports


def progress_note(out: Path, number: int) -> Callable[[int], None]:
    """A function that notes in the work folder how many files of a shard are finished.

    It writes only where the last time is a while ago. What an earlier process noted is removed.
    """
    path, written = work_folder(out) / f"progress-{number:05d}", time.monotonic()
    path.unlink(missing_ok=True)

    def note(files: int) -> None:
        nonlocal written
        if time.monotonic() - written >= _SECONDS_BETWEEN_NOTES:
            path.write_text(str(files), encoding="ascii")
            written = time.monotonic()

    return note


def read_progress(out: Path, number: int) -> int:
    """Files of a shard that are finished, as last noted; 0 without a note."""
    try:
        return int((work_folder(out) / f"progress-{number:05d}").read_text("ascii"))
    except (FileNotFoundError, ValueError):  # not written yet, or half
        return 0


def remove_work_folder(out: Path) -> None:
    """Removes the work folder at once, which ends a preparation."""
    work_folder(out).rename(_removed(out))
    shutil.rmtree(_removed(out))


def _write(path: Path, value: Json) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(value), encoding="utf-8")


def video_hours(manifest: Manifest, fps: Fraction) -> float:
    """Hours that all clips take together; images take none."""
    frames = manifest.shape[:, 0]
    return float(frames[frames > 1].sum() / fps) / 3600


def reasons(rows: Sequence[Skipped]) -> list[tuple[str, int, str]]:
    """(reason, number of files, one of them), the most frequent first.

    Reasons that differ in numbers alone are one; the numbers shown are those of that file.
    """
    kinds: dict[str, list[Skipped]] = {}
    for row in rows:
        kinds.setdefault(re.sub(r"\d[\d.,]*", "N", row.reason.split(" (")[0]), []).append(row)
    found = ((same[0].reason.split(" (")[0], len(same), same[0].path) for same in kinds.values())
    return sorted(found, key=lambda one: (-one[1], one[0]))
