"""Captions: found under the names that people use, and cleaned."""

import codecs
import json
import math
import unicodedata
from collections.abc import Iterable
from typing import Any

from alload_jax.data.prepare.unusable import UnusableError, short
from alload_jax.errors import InputError

CAPTION_COLUMNS = (
    *("caption", "text", "prompt", "captions", "description", "title", "long_caption"),
    *("short_caption", "label", "class"),
)
"""Names under which tables and JSON files keep captions; the first that is there is taken."""
PATH_COLUMNS = (
    *("file_name", "filename", "file_path", "filepath", "path", "video", "video_path", "image"),
    *("image_path", "media", "media_path", "file", "clip", "clip_path", "videos"),
)
"""Names under which tables keep paths."""
SIDECARS = (".txt", ".json", ".caption")
"""Suffixes of files that hold the caption of the media file beside them."""
LONGEST_FILE = 2**20
"""Bytes of a caption file that are read."""


def find_column(names: Iterable[str], known: tuple[str, ...], asked: str | None) -> str | None:
    """The column of `names` that was asked for, or the first of the known ones, in any case."""
    by_name = {name.strip().lower(): name for name in reversed(list(names))}
    wanted = known if asked is None else (asked.strip().lower(),)
    return next((by_name[name] for name in wanted if name in by_name), None)


def as_caption(value: Any) -> str | None:
    """A table's or JSON file's value as a caption: of a list, the first; None for nothing."""
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    if value is None or isinstance(value, dict):
        return None
    if isinstance(value, float):
        if math.isnan(value):  # what pandas writes for a caption that is missing
            return None
        if value.is_integer():  # a column of numbers with gaps
            value = int(value)
    return str(value)


def parse_sidecar(data: bytes, suffix: str, column: str | None) -> str | None:
    """The caption in the bytes of a .txt, .caption or .json file.

    Raises:
      UnusableError: the bytes are no text, or the JSON is not valid.
    """
    text = _decoded(data)
    if suffix != ".json":
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"its caption is not valid JSON ({short(error)})") from error
    if isinstance(found, dict):
        name = find_column((str(key) for key in found), CAPTION_COLUMNS, column)
        return None if name is None else as_caption(found[name])
    return as_caption(found)


def _decoded(data: bytes) -> str:
    """Text in UTF-8, or in UTF-16 with a mark as Windows writes it, without a character cut off."""
    marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    decoder = codecs.getincrementaldecoder("utf-16" if marked else "utf-8-sig")()
    try:
        return decoder.decode(data, final=len(data) < LONGEST_FILE)
    except UnicodeDecodeError as error:
        raise UnusableError("its caption is not UTF-8; save it as UTF-8") from error


def clean(caption: str) -> str:
    """A caption on one line, without control characters and characters that are not Unicode."""
    spaced = " ".join(caption.split())
    kept = (char for char in spaced if unicodedata.category(char) not in ("Cc", "Cs", "Cn"))
    return " ".join("".join(kept).split())


def require_column(
    place: str, names: Iterable[str], known: tuple[str, ...], asked: str | None, flag: str
) -> str:
    """`find_column`, where the column must be there.

    Raises:
      InputError: it is not.
    """
    names = list(names)
    if (found := find_column(names, known, asked)) is None:
        wanted = asked or " or ".join(known[:3])
        raise InputError(
            f"{place}: has no column {wanted}, but {', '.join(names) or 'none'}; name it with "
            f"{flag}"
        )
    return found
