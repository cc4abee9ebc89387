"""One input file: where its bytes are, and its caption."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from alload_jax.data.prepare.unusable import UnusableError, short

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
"""Suffixes of images."""
VIDEOS = frozenset(
    {".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts"}
    | {".wmv", ".flv", ".gif", ".ogv", ".3gp", ".vob"}
)
"""Suffixes of videos; GIF is one, with one frame or many."""
MEDIA = IMAGES | VIDEOS


@dataclass(frozen=True)
class Source:
    """A file, or a member of a tar shard.

    Attributes:
      path: the file that is opened.
      offset: first byte of the content; 0 for a file.
      size: number of bytes of the content.
    """

    path: Path
    offset: int
    size: int


@dataclass(frozen=True)
class Item:
    """An image or a video with its caption, or the reason why it cannot be used.

    Attributes:
      name: path within the input, as messages and the report give it; valid Unicode.
      source: its bytes; None if it cannot be used.
      caption: the caption as found; None if there is none.
      reason: why it cannot be used; empty if it can.
      alternatives: further captions of it.
    """

    name: str
    source: Source | None
    caption: str | None = None
    reason: str = ""
    alternatives: tuple[str, ...] = ()

    @classmethod
    def captioned(cls, name: str, source: Source, captions: Sequence[str]) -> "Item":
        """A usable file with its captions; with none if there are none."""
        first = captions[0] if captions else None
        return cls(name, source, first, alternatives=tuple(captions[1:]))

    @property
    def is_image(self) -> bool:
        """Whether the suffix is an image's."""
        return suffix_of(self.name) in IMAGES


def suffix_of(name: str) -> str:
    """The suffix of a file name in lower case, such as `.mp4`."""
    return PurePosixPath(name).suffix.lower()


def readable_name(name: str) -> str:
    """A file name as valid Unicode; bytes that are not UTF-8 become replacement characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def checked_source(root: Path, relative: str) -> Source:
    """The source of a file of the folder `root`, which must be an existing, resolved path.

    Raises:
      UnusableError: the path is absolute, has `..`, leads out of the folder by a link, or names no
        regular file that has content.
    """
    parts = PurePosixPath(relative.replace("\\", "/"))
    if parts.is_absolute() or (len(relative) > 1 and relative[1] == ":"):
        raise UnusableError("absolute path; give it relative to the table's folder")
    if ".." in parts.parts:
        raise UnusableError("path with '..', which could leave the folder")
    try:
        real = (root / relative).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # missing, circle of links, NUL in it
        raise UnusableError(f"no such file ({type(error).__name__})") from error
    if not real.is_relative_to(root):
        raise UnusableError("link out of the folder")
    if not real.is_file():
        raise UnusableError("not a regular file")
    size = real.stat().st_size
    if not size:
        raise UnusableError("empty file (0 bytes)")
    return Source(real, 0, size)


class _Part(io.RawIOBase):
    """Bytes `offset` to `offset + size` of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, size: int):
        self._file, self._offset, self._size, self._at = file, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._offset + self._at)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """Opens the bytes of a source for reading.

    Raises:
      UnusableError: the file is gone or may not be read.
    """
    try:
        file = source.path.open("rb")
    except OSError as error:
        raise UnusableError(f"cannot be opened ({error.strerror or short(error)})") from error
    with file:
        whole = source.offset == 0 and source.size == source.path.stat().st_size
        part = file if whole else io.BufferedReader(_Part(file, source.offset, source.size))
        yield cast(BinaryIO, part)


def read_bytes(source: Source, limit: int) -> bytes:
    """The first `limit` bytes of a source.

    Raises:
      UnusableError: it cannot be read.
    """
    with opened(source) as file:
        return file.read(limit)
