"""Brings a data folder up to date with its media: files are compared by content, captions by text.

What the folder and the finished shards of an interrupted update hold is not encoded again. The
manifest changes last and at once. Shards that it no longer names stay until the next update, for
runs that read them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.manifest import (
    CAPTION,
    CAPTIONS,
    CONTENT,
    DROPOUT,
    FOUND,
    JOINED,
    NEXT_NUMBER,
    NUMBER,
    PATH,
    WEIGHT,
    table_of,
)
from alload_jax.data.prepare.captions import clean
from alload_jax.data.prepare.sources import Item, UnusableError, content_of
from alload_jax.data.prepare.work_folder import Skipped, UnitReport, read_reports
from alload_jax.data.store.files import (
    finish_store,
    finished_shards,
    partial_folder,
    shard_number,
    stored_part,
)
from alload_jax.data.store.writer import origin_differences
from alload_jax.errors import InputError
from alload_jax.files import Json

_THREADS = 8
_Row = Json
_place, _size = itemgetter("shard", "index"), itemgetter("frames", "height", "width")


@dataclass(frozen=True)
class _File:
    """The clips of one file in one shard.

    Attributes:
      rows: their rows of the manifest, in order.
      folder: where the shard lies.
      stored: whether the manifest names them.
    """

    rows: list[_Row]
    folder: Path
    stored: bool

    @property
    def path(self) -> str:
        return str(self.rows[0][PATH])


@dataclass
class Found:
    """An input file, as the data folder knows it.

    Attributes:
      item: the file, with the digest of its content.
      before: what the manifest has of it; None if it is new, or its content is.
      now: what is stored of it with its present captions; None if that is to be encoded.
    """

    item: Item
    before: _File | None = None
    now: _File | None = None


class Update:
    """An update of a data folder, which may not exist yet.

    Attributes:
      found: the input files, in order.
      todo: what is to be encoded.
      first: number of the first shard to write.
    """

    def __init__(self, out: Path, items: Sequence[Item], origin: Json):
        """Compares the input files with the folder.

        Raises:
          InputError: the folder was prepared with other settings, before contents were recorded, or
            from other files.
        """
        self._out, self._parts = out, stored_part(out)
        for part in self._parts:
            origins = {"the folder": part.notes["origin"], "this command": origin}
            if differences := origin_differences(origins):
                raise InputError(
                    f"{out}: was prepared with other settings: {differences[0]}; give the same, or "
                    "prepare the media to another folder"
                )
            _require_contents(out, part.rows, {item.name for item in items})
        for part in self._parts:  # of shards that it no longer names since an earlier update
            named = {*part.notes["shard_bytes"], *(each.path.name for each in finished_shards(out))}
            for path in out.glob("shard-*.arrayrecord"):
                if path.name not in named:
                    path.unlink()
        with ThreadPoolExecutor(_THREADS) as pool:
            self._items = list(pool.map(_with_content, items))
        self.found, files = self._match()
        rows = self._parts[0].rows if self._parts else None
        paths = set() if rows is None else set(rows[PATH].to_pylist())
        known = rows is None or any(each.before or each.item.name in paths for each in self.found)
        if not known:
            raise InputError(
                f"{out}: holds none of these {len(items):,} files, so all of its samples would "
                "leave; name the input that it was prepared from, or another --out"
            )
        self.todo = []
        for item in (each.item for each in self.found if each.now is None):
            if stored := files.get(item.content):  # of which only the captions are encoded
                records = tuple(
                    (stored[0].folder / row["shard"], row["index"], row["checksum"], _size(row))
                    for row in stored[0].rows
                )
                item = replace(item, records=records)
            self.todo.append(item)
        places = (out, partial_folder(out))
        names = (path.name for place in places if place.is_dir() for path in place.iterdir())
        self.first = max(map(shard_number, names), default=-1) + 1

    def commit(self) -> str:
        """Writes the manifest of what is stored now; returns what has changed, in words.

        Where no file can be used it writes nothing, and returns "".
        """
        self.found, _ = self._match()
        before = self._parts[0].rows.to_pylist() if self._parts else []
        next_number = len(before)
        if self._parts:
            next_number = int(self._parts[0].notes.get(NEXT_NUMBER, next_number))
        numbers = {_place(row): row.get(NUMBER, at) for at, row in enumerate(before)}
        taken: dict[object, _Row] = {}
        new: list[_Row] = []
        texts = 0
        for each in self.found:
            if each.now is None:
                continue
            told: _Row = {PATH: each.item.name, FOUND: list(each.item.found) or None}
            told |= {WEIGHT: None if each.item.weight == 1 else each.item.weight}
            told |= {DROPOUT: each.item.dropout or None}
            rows = [row | told for row in each.now.rows]
            old = each.before.rows if each.before else []
            if len(old) != len(rows):
                new += rows
                continue
            texts += each.now is not each.before
            for was, row in zip(old, rows, strict=True):
                joined = was.get(JOINED) or was["checksum"]
                kept = joined if joined != row["checksum"] else None
                taken[_place(was)] = row | {NUMBER: numbers[_place(was)], JOINED: kept}
        for row in before:  # that a program has added
            if not row.get(CONTENT):
                taken[_place(row)] = row | {NUMBER: numbers[_place(row)]}
        staying = [taken[_place(row)] for row in before if _place(row) in taken]
        joining = [row | {NUMBER: next_number + at} for at, row in enumerate(new)]
        found = [*staying, *joining]
        next_number += len(new)
        if not found:
            return ""
        if all(row[NUMBER] == at for at, row in enumerate(found)) and next_number == len(found):
            found = [{**row, NUMBER: None} for row in found]
        finish_store(self._out, rows=table_of(found), next_number=next_number)
        used = [each for each in self.found if each.now]
        joined = sum(each.before is None for each in used)
        left = len({(row[PATH], row[CONTENT]) for row in before if _place(row) not in taken})
        return (
            f"{joined:,} files joined, {left:,} left, {texts:,} have new captions, "
            f"{len(used) - joined - texts:,} are the same"
        )

    def report(self, listed: Path) -> UnitReport:
        """What became of the input files, those that stay included, of which `listed` tells."""
        skipped: dict[str, dict[str, Skipped]] = defaultdict(dict)
        now: dict[str, list[Found]] = defaultdict(list)
        for each in self.found:
            now[each.item.name].append(each)
        before = pyarrow.parquet.read_table(listed).to_pylist() if listed.is_file() else []
        stored = self._parts[0].rows.to_pylist() if self._parts else []
        contents: dict[str, dict[str, None]] = defaultdict(dict)
        for stored_row in stored:
            contents[stored_row[PATH]][stored_row.get(CONTENT) or ""] = None
        used = [each for each in self.found if each.now]
        of_content: dict[str, list[Found]] = defaultdict(list)
        for each in used:
            of_content[each.item.content].append(each)
        for row in before:  # of files of which something is stored, and of copies of them
            known = contents[row["path"]] if row["clips"] else ()
            for each in (found for content in known for found in of_content[content]):
                same = each.now is each.before and each.before and each.before.path == row["path"]
                if same or "caption" not in row["reason"]:
                    one = Skipped(**row | {"path": each.item.name})
                    skipped[one.path][one.reason] = one
        for number, report in read_reports(self._out).items():
            for one in report.skipped:
                files = now.get(one.path, ())
                if any(not f.now or shard_number(f.now.rows[0]["shard"]) == number for f in files):
                    skipped[one.path][one.reason] = one
        return UnitReport(
            used=len(used),
            without_caption=sum(not any(each.item.captions[:1]) for each in used),
            skipped=[row for name in now for row in skipped[name].values()],
        )

    def _match(self) -> tuple[list[Found], dict[str, list[_File]]]:
        """The input files as they are stored now, and all that is stored, by content."""
        files: dict[str, list[_File]] = defaultdict(list)
        for file in self._files():
            files[str(file.rows[0][CONTENT])].append(file)
        found = [Found(item) for item in self._items]
        free = {content: [f for f in known if f.stored] for content, known in files.items()}
        for same_path in (True, False):  # a copy does not take what belongs to another path
            for each in found:
                for file in free.get(each.item.content, ()) if each.before is None else ():
                    if not same_path or file.path == each.item.name:
                        each.before = file
                        free[each.item.content].remove(file)
                        break
        for each in found:
            captions = list(map(clean, each.item.captions or ("",)))
            known = [each.before] if each.before else []
            known += [f for f in files.get(each.item.content, ()) if not f.stored]
            fits = [
                f
                for f in known
                if (f.rows[0].get(CAPTIONS) or [f.rows[0][CAPTION] or ""]) == captions
            ]
            # Copies of a file with one caption each have clips of their own.
            each.now = next((f for f in fits if f.stored or f.path == each.item.name), None)
        return found, files

    def _files(self) -> Iterator[_File]:
        for stored, parts in ((True, self._parts), (False, finished_shards(self._out))):
            for part in parts:
                rows: dict[tuple[str, ...], list[_Row]] = defaultdict(list)
                for row in part.rows.to_pylist():
                    if row.get(CONTENT):
                        rows[row[CONTENT], row.get(PATH), row["shard"]].append(row)
                for own in rows.values():
                    yield _File(own, part.path.parent, stored)


def _with_content(item: Item) -> Item:
    if item.source is None:
        return item
    try:
        return replace(item, content=content_of(item.source, item.own, item.copy))
    except UnusableError as error:
        return replace(item, source=None, reason=str(error))


def _require_contents(out: Path, rows: pa.Table, names: set[str]) -> None:
    """Refuses rows of media of which the content is not known; others' rows stay as they are."""
    have = set(rows.column_names)
    paths = rows[PATH].to_pylist() if PATH in have else [None] * len(rows)
    contents = rows[CONTENT].to_pylist() if CONTENT in have else [None] * len(rows)
    if not any(contents) or any(
        path in names for path, content in zip(paths, contents, strict=True) if not content
    ):
        raise InputError(
            f"{out}: does not record the content of its files, as an earlier version wrote it; "
            "prepare the media again, to another folder"
        )
