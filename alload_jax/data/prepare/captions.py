"""Captions: found under the names that people use, and cleaned."""

import codecs
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from alload_jax.data.prepare.sources import MEDIA, UnusableError, readable_name, suffix_of
from alload_jax.errors import InputError
from alload_jax.files import parse_json

CAPTION_COLUMNS = (
    *("caption", "text", "prompt", "captions", "description", "title", "long_caption"),
    *("short_caption", "label", "class", "cap"),
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


def as_caption(value: object) -> str | None:
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


@dataclass(frozen=True)
class CaptionRule:
    """Where captions are found, and whether one or all of a file are taken.

    Attributes:
      column: column of a table or key of a JSON file; None finds it by its name.
      every: whether each line of a text file is a caption, each entry of a list, and each of the
        columns caption, caption_1, caption_2 and so on.
    """

    column: str | None = None
    every: bool = False

    def columns(self, names: Iterable[str]) -> list[str]:
        """Those of the names that hold captions."""
        names = [name for name in names if name]
        found = find_column(names, CAPTION_COLUMNS, self.column)
        first = [] if found is None else [found]
        if not self.every:
            return first
        for base in first or (CAPTION_COLUMNS if self.column is None else (self.column,)):
            stem = re.escape(base.strip().lower().removesuffix("s"))  # of caption_1, caption_2
            pattern = re.compile(rf"{stem}s?[ _-]?(\d{{1,4}})")
            matches = ((pattern.fullmatch(name.strip().lower()), name) for name in names)
            if numbered := sorted((int(match[1]), name) for match, name in matches if match):
                return [*first, *(name for _, name in numbered)]
        return first

    def of_values(self, values: Iterable[object]) -> list[str]:
        """The captions in the values of a file's columns; empty if there are none."""
        if not self.every:
            return [caption for value in values if (caption := as_caption(value)) is not None][:1]
        found = (as_caption(entry) for value in values for entry in _entries(value))
        return _distinct(caption for caption in found if caption is not None)

    def of_sidecar(self, data: bytes, suffix: str) -> list[str]:
        """The captions in the bytes of a .txt, .caption or .json file; empty if there are none.

        Raises:
          UnusableError: the bytes are no text, or the JSON is not valid.
        """
        # In UTF-8, or in UTF-16 with a mark as Windows writes it, without a character cut off.
        marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        decoder = codecs.getincrementaldecoder("utf-16" if marked else "utf-8-sig")()
        try:
            text = decoder.decode(data, final=len(data) < LONGEST_FILE)
        except UnicodeDecodeError as error:
            raise UnusableError("its caption is not UTF-8; save it as UTF-8") from error
        if suffix != ".json":
            return _distinct(re.split(r"\r?\n", text)) if self.every else [text]
        try:
            found = parse_json(text, "its caption", "fix it", finite=False)
        except InputError as error:
            raise UnusableError(str(error)) from error
        if not isinstance(found, dict):
            return self.of_values([found])
        by_name = {str(key): value for key, value in found.items()}
        named = self.columns(by_name)
        by_name = {key: value for key, value in by_name.items() if not isinstance(value, dict)}
        if named and not self.columns(by_name):
            raise UnusableError(
                f"{named[0]} is no text but an object; --caption-column names others"
            )
        return self.of_values([by_name[name] for name in self.columns(by_name)])


_Stem = tuple[int, str]
"""What a caption and its media file have in common, a level, of which a lower one is closer, and a
name."""


class CaptionFiles:
    """The caption files of a folder or an archive, by the media that they belong to.

    clip.v1.mp4 has clip.v1.txt or clip.v1.mp4.txt, else the file whose name differs in its Unicode
    form only, as names from macOS do, or in the case of .mp4, and in an archive else the one with
    the same name up to the first dot, as WebDataset groups members. A caption belongs to the media
    that it is closest to.
    """

    def __init__(self, names: Sequence[str], by_first_dot: bool = False):
        """Takes all names of files; an archive may have a name several times."""
        self._by_first_dot = by_first_dot
        self._count = Counter(names)
        self._media: Counter[tuple[_Stem, str]] = Counter()
        self._texts: dict[tuple[_Stem, str], list[str]] = defaultdict(list)
        for name in (each for each in names if suffix_of(each) in MEDIA):
            self._media.update((stem, suffix_of(name)) for stem in self._stems_of_media(name))
        stems = {stem for stem, _ in self._media}
        for name in (each for each in names if suffix_of(each) in SIDECARS):
            fitting = [stem for stem in self._stems(_base(name)) if stem in stems]
            if fitting:
                self._texts[fitting[0], suffix_of(name)].append(name)

    def of(self, name: str) -> str | None:
        """The caption file of a media file; None if there is none.

        Raises:
          UnusableError: several belong to it, or one belongs to several files of its suffix.
        """
        if self._count[name] > 1:
            raise UnusableError("several files have this name; keep one")
        for stem in self._stems_of_media(name):
            for suffix in SIDECARS:
                texts = self._texts.get((stem, suffix), [])
                if len(texts) > 1:
                    both = " and ".join(map(readable_name, texts[:2]))
                    raise UnusableError(f"several captions, {both}; keep one")
                if texts and self._media[stem, suffix_of(name)] > 1:
                    raise UnusableError(
                        f"several {suffix_of(name)} files for the caption {readable_name(texts[0])}"
                        "; give each a caption with its own name"
                    )
                if texts:
                    return texts[0]
        return None

    def _stems_of_media(self, name: str) -> list[_Stem]:
        stems = {*self._stems(_base(name)), *self._stems(name)}
        # clip, of clip.mp4, before clip.mp4 itself
        return sorted(stems, key=lambda stem: (stem[0], len(stem[1])))

    def _stems(self, base: str) -> list[_Stem]:
        composed = unicodedata.normalize("NFC", base)
        if (suffix := suffix_of(composed)) in MEDIA:  # of clip.MP4.txt
            composed = _base(composed) + suffix
        folder, slash, last = composed.rpartition("/")
        first = last.partition(".")[0]
        grouped = [(2, folder + slash + first)] if first and self._by_first_dot else []
        return [(0, base), (1, composed), *grouped]


def _base(name: str) -> str:
    """A file name without its suffix."""
    return name.removesuffix(PurePosixPath(name).suffix)


def _entries(value: object) -> list[object]:
    """The entries of a list, also of one that a CSV file holds as JSON; or the value alone."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value, "", "", finite=False)
        except InputError:  # a caption that begins with a bracket
            return [value]
    return list(value) if isinstance(value, list | tuple) else [value]


def _distinct(captions: Iterable[str]) -> list[str]:
    """The captions without those that are empty or equal to an earlier one; "" if all are empty."""
    captions, kept = list(captions), dict[str, str]()
    for caption in captions:
        if cleaned := clean(caption):
            kept.setdefault(cleaned, caption)
    return list(kept.values()) or captions[:1]


def clean(caption: str) -> str:
    """A caption on one line, without control characters and characters that are not Unicode."""
    spaced = " ".join(caption.split())
    kept = (char for char in spaced if unicodedata.category(char) not in ("Cc", "Cs", "Cn"))
    return " ".join("".join(kept).split())


def require_column(
    table: Path, names: Sequence[str], known: tuple[str, ...], asked: str | None, flag: str
) -> str:
    """`find_column`, where the column must be there.

    Raises:
      InputError: it is not.
    """
    if (found := find_column(names, known, asked)) is None:
        wanted, held = asked or " or ".join(known[:3]), ", ".join(names) or "none"
        raise InputError(f"{table}: has no column {wanted}, but {held}; name it with {flag}")
    return found
