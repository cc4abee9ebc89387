"""Finds the inputs of a folder, a table, tar files or a set, in an order by their names alone."""

import codecs
import csv
import io
import itertools
import os
import random
import re
import tarfile
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.prepare.captions import (
    CAPTION_COLUMNS,
    LONGEST_FILE,
    PATH_COLUMNS,
    SIDECARS,
    CaptionFiles,
    CaptionRule,
    as_caption,
    clean,
    require_column,
)
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.prepare.sources import (
    MEDIA,
    Item,
    Source,
    UnusableError,
    checked_source,
    opened,
    readable_name,
    short,
    suffix_of,
)
from alload_jax.errors import VALUE_KINDS, InputError, print_stderr
from alload_jax.files import (
    Json,
    parse_json,
    parse_yaml,
    read_text,
    replacing,
    require_regular,
    visible_files,
)
from alload_jax.planning.epoch import LEAST_WEIGHT, MOST_WEIGHT

_SILENT = frozenset(
    {*SIDECARS, ".jsonl", ".csv", ".tsv", ".parquet", ".md", ".srt", ".vtt", ".ini", ".db", ".npy"}
    | {".html", ".yaml", ".yml", ".safetensors", ".part", ".log"}
)
"""Suffixes of files that belong beside media, which no report lists."""


def folder_items(folder: Path, rule: CaptionRule) -> list[Item]:
    """The media of a folder and of the folders in it, by name.

    Args:
      folder: the folder.
      rule: which captions are taken.
    """
    root = folder.resolve()
    names = list(visible_files(root, links=True))
    texts, found = CaptionFiles(names), sorted(names, key=os.fsencode)

    def find(name: str) -> tuple[Source, list[str]]:
        if suffix_of(name) not in MEDIA and (root / name).is_dir():
            raise UnusableError("link to a folder, which is not followed")
        if is_lower_table(name):
            raise UnusableError(
                "table of a folder below, not read; prepare that or list it in a set"
            )
        _require_media(name)
        source = checked_source(root, name)
        if (text := texts.of(name)) is None:
            return source, []
        if (root / text).is_file() and not (root / text).stat().st_size:
            return source, [""]
        try:
            with opened(checked_source(root, text)) as file:
                data = file.read(LONGEST_FILE)
        except UnusableError as error:
            raise UnusableError(f"its caption {readable_name(text)}: {error}") from error
        return source, rule.of_sidecar(data, suffix_of(text))

    def is_lower_table(name: str) -> bool:
        folder, _, last = name.rpartition("/")
        return bool(folder) and last in TABLE_NAMES

    return [
        _item(readable_name(name), partial(find, name))
        for name in found
        if suffix_of(name) in MEDIA or suffix_of(name) not in _SILENT or is_lower_table(name)
    ]


def _item(name: str, find: Callable[[], tuple[Source, list[str]]]) -> Item:
    """The item of a source and its captions, or of the reason why there is none."""
    try:
        source, captions = find()
    except UnusableError as error:
        return Item(name, None, reason=str(error))
    return Item(name, source, tuple(captions))


_PACKED = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz)$", re.IGNORECASE)
_UNPACK = "is compressed; unpack it by gunzip, bunzip2, unxz or unzstd, a .tar is read as it is"


def _require_media(name: str) -> None:
    if _PACKED.search(name):
        raise UnusableError(_UNPACK)
    if (suffix := suffix_of(name)) not in MEDIA:
        raise UnusableError(f"suffix {suffix or 'missing'}: not an image or video")


TABLES = (".csv", ".jsonl", ".json", ".parquet")
"""Suffixes of tables."""
_WEIGHT = "weight"
_LISTS = (("prompt.txt", "prompts.txt", "captions.txt"), ("videos.txt", "images.txt"))
"""Lists of captions and of media, by lines, as finetrainers reads them."""


def table_items(
    table: Path, path_column: str | None, rule: CaptionRule, root: Path | None = None
) -> list[Item]:
    """The media of a table in the order of its rows.

    Args:
      table: the file; of lists by lines, that of the media.
      path_column: column of paths; None finds it.
      rule: which captions are taken.
      root: folder that paths are relative to; None for the table's, or `videos` in it.

    Raises:
      InputError: the table cannot be read, or has no column of paths, or lacks a column asked for.
    """
    read = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    read |= {".json": _json_rows, ".txt": _list_rows}
    require_regular(table)
    try:
        rows = list(read[table.suffix.lower()](table, path_column, rule))
    except (OSError, ValueError, csv.Error, pa.ArrowException, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error, UnicodeError):
            raise InputError(f"{table}: is not UTF-8; save it as UTF-8") from error
        kind = table.suffix[1:].upper()
        raise InputError(f"{table}: cannot be read as {kind} ({short(error)}); fix it") from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    path = require_column(table, names, PATH_COLUMNS, path_column, "--path-column")
    captions = rule.columns(name for name in names if name != path)
    if rule.column is not None and not captions:
        require_column(table, names, CAPTION_COLUMNS, rule.column, "--caption-column")
    _require_once(table, names, (path, *captions))
    if _WEIGHT in map(str.lower, names):
        print_stderr(
            f"note: {table}: the column {_WEIGHT} is not read; name paths in data.weights of the "
            "training config, or weigh folders in a set of several"
        )
    place = (root or table.parent).resolve()
    folders = [place] if root else [place, place / "videos"]  # where FastVideo keeps them

    def find(name: str, row: Json) -> tuple[Source, list[str]]:
        if not name:
            raise UnusableError("row without a path")
        _require_media(name)
        words = rule.of_values(row.get(each) for each in captions)
        found = (each for each in folders if os.path.exists(each / name))
        return checked_source(next(found, place), name), words

    def within(name: str) -> str:
        slashed = name.replace("\\", "/")  # as Windows does not write it
        name = slashed if any(os.path.exists(each / slashed) for each in folders) else name
        relative = os.path.relpath(name, place) if os.path.isabs(name) else ".."
        return name if relative.startswith("..") else relative

    named = ((within(readable_name(as_caption(row.get(path)) or "")), row) for row in rows)
    return [_item(name, partial(find, name, row)) for name, row in named]


def _require_once(table: Path, names: Iterable[str], used: Iterable[str]) -> None:
    """Refuses a table in which a column that is used has the name of another in other letters."""
    names = list(names)
    for column in used:
        same = [name for name in names if name.strip().lower() == column.strip().lower()]
        if len(same) > 1:
            raise InputError(
                f"{table}: has the columns {same[0]!r} and {same[1]!r}, whose names are the same "
                "but for case and spaces; rename or remove one"
            )


def _lines(table: Path) -> Iterator[str]:
    """The lines of a text in UTF-8, or in UTF-16 with a mark as Windows writes it."""
    with table.open("rb") as file:
        marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    with table.open(encoding="utf-16" if marked else "utf-8-sig", newline="") as text:
        yield from text


def _csv_rows(table: Path, _: str | None, __: CaptionRule) -> Iterator[Json]:
    before, lines = csv.field_size_limit(2**24), _lines(table)
    # Excel may begin with a line that names the delimiter.
    found = (each for each in enumerate(lines) if each[1].strip() and each[1][:4] != "sep=")
    skipped, header = next(found, (0, ""))
    # Spreadsheets of languages with a decimal comma put semicolons between values.
    delimiter = next((each for each in ";\t" if each in header and "," not in header), ",")
    begun = skipped + 1
    try:
        # Tables with tabs seldom quote.
        rows, strict = itertools.chain([header], lines), delimiter != "\t"
        reader = csv.DictReader(rows, delimiter=delimiter, strict=strict)
        fields = [name for name in reader.fieldnames or () if name]
        _require_once(table, fields, fields)
        begun = skipped + reader.line_num + 1
        for row in reader:
            if None in row:
                number = skipped + reader.line_num
                raise InputError(
                    f"{table}: line {number} has more fields than the header; put "
                    'values with commas in quotes, such as "a red flower, close up"'
                )
            yield {name: value for name, value in row.items() if name}
            begun = skipped + reader.line_num + 1
    except csv.Error as error:  # such as a quote that would take in all rows behind it
        raise InputError(
            f"{table}: line {begun}: {error}; put values with quotes in quotes and double those "
            'in them, as in "a ""red"" flower"'
        ) from error
    finally:
        csv.field_size_limit(before)


def _jsonl_rows(table: Path, _: str | None, __: CaptionRule) -> Iterator[Json]:
    for number, line in enumerate(_lines(table), 1):
        if not line.strip():
            continue
        row = parse_json(line, f"{table}: line {number}", "fix it", finite=False)
        if not isinstance(row, dict):
            raise InputError(f"{table}: line {number} is not a JSON object; fix it")
        yield row


def _json_rows(table: Path, _: str | None, __: CaptionRule) -> Iterator[Json]:
    rows = parse_json(table.read_bytes(), str(table), "fix it", finite=False)
    if isinstance(rows, dict):  # captions by path: diffusion-pipe's captions.json, kohya's metadata
        rows = [
            {"path": path} | (held if isinstance(held, dict) else {"caption": held})
            for path, held in rows.items()
        ]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{table}: is no list of JSON objects, nor captions by path; fix it")
    yield from rows


def _list_rows(table: Path, _: str | None, __: CaptionRule) -> Iterator[Json]:
    texts = next(table.with_name(name) for name in _LISTS[0] if table.with_name(name).is_file())
    paths, captions = (  # not by splitlines, to which U+2028 in a caption ends a line
        [line.rstrip("\r\n") for line in _lines(path)] for path in (table, texts)
    )
    if len(paths) != len(captions):
        raise InputError(
            f"{table}: has {len(paths)} lines, and {texts.name} {len(captions)}; give one caption "
            "in a line for each file"
        )
    for path, caption in zip(paths, captions, strict=True):
        yield {"path": path, "caption": caption}


def _parquet_rows(table: Path, path_column: str | None, rule: CaptionRule) -> Iterator[Json]:
    with pyarrow.parquet.ParquetFile(table) as file:
        held = file.schema_arrow.names
        _require_once(table, held, held)
        # Tables of datasets often hold the media's bytes as well, which nobody wants in memory.
        asked = (name.lower() for name in (path_column, rule.column) if name)
        known = {
            *PATH_COLUMNS,
            *CAPTION_COLUMNS,
            _WEIGHT,
            *asked,
            *map(str.lower, rule.columns(held)),
        }
        names = [name for name in held if name.lower() in known]
        if not names:
            require_column(table, held, PATH_COLUMNS, None, "--path-column")
        for batch in file.iter_batches(columns=names):
            yield from batch.to_pylist()


def tar_items(path: Path, rule: CaptionRule) -> list[Item]:
    """The media of an uncompressed .tar file, in the order of its members.

    Nothing is unpacked: members are read where they lie. A file that is damaged, or no uncompressed
    .tar, gives an item with the reason, after the items of the members before the damage.

    Args:
      path: the file.
      rule: which captions are taken.
    """
    members: list[tarfile.TarInfo] = []
    damage = ""
    try:
        with _Headers(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            members.extend(archive)
    except (tarfile.TarError, OSError, ValueError) as error:
        damage = f"cannot be read as an uncompressed .tar ({short(error)})"
        damage = _UNPACK if _PACKED.search(path.name) else damage
    # A member has the same name whether it is clip.mp4 or ./clip.mp4.
    named = [(str(PurePosixPath(each.name)), each) for each in members if not each.isdir()]
    texts, by_name = CaptionFiles([name for name, _ in named], by_first_dot=True), dict(named)

    def find(name: str, member: tarfile.TarInfo) -> tuple[Source, list[str]]:
        source = _source(path, member)
        if not source.size:
            raise UnusableError("empty file (0 bytes)")
        if (text := texts.of(name)) is None:
            return source, []
        with opened(_source(path, by_name[text])) as file:
            return source, rule.of_sidecar(file.read(LONGEST_FILE), suffix_of(text))

    items = [
        _item(readable_name(f"{path.name}/{member.name}"), partial(find, name, member))
        for name, member in named
        if suffix_of(name) in MEDIA
    ]
    return [*items, Item(readable_name(path.name), None, reason=damage)] if damage else items


class _Headers(io.FileIO):
    """A .tar file of which only headers are read, which may claim to be of any size."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 0, 2**20))


def _source(path: Path, member: tarfile.TarInfo) -> Source:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise UnusableError("tar member with an absolute path or '..'")
    if member.issym() or member.islnk():
        raise UnusableError("tar member that is a link")
    if not member.isreg() or member.issparse():
        raise UnusableError("tar member that is not a plain file")
    if member.offset_data + member.size > path.stat().st_size:
        raise UnusableError("truncated tar member")
    return Source(Path(os.path.realpath(path)), member.offset_data, member.size)


TABLE_NAMES = (
    *("metadata.csv", "metadata.jsonl", "metadata.json", "metadata.parquet"),
    *("captions.csv", "captions.jsonl", "captions.json", "captions.parquet"),
    "videos2caption.json",
)
"""Tables that are taken for the list of a folder's media."""


def find_items(
    place: Path,
    path_column: str | None = None,
    caption_column: str | None = None,
    every_caption: bool = False,
    media_root: Path | None = None,
) -> list[Item]:
    """The items of a folder, a table or tar shards.

    Args:
      place: a folder of media, with or without a table of `TABLE_NAMES` or with .tar files; a
        .csv, .jsonl or .parquet file; or a .tar file.
      path_column, caption_column: names of the columns (or JSON keys); None finds them.
      every_caption: whether all captions of a file are taken; see `CaptionRule`.
      media_root: folder that the paths of a table are relative to; None for its own.

    Raises:
      InputError: there is no such place, a table cannot be read, or nothing is found.
    """
    rule = CaptionRule(caption_column, every_caption)
    tables = [place / name for name in TABLE_NAMES if (place / name).is_file()]
    if any((place / name).is_file() for name in _LISTS[0]):
        tables += [place / name for name in _LISTS[1] if (place / name).is_file()]
    if not place.is_dir() and not place.is_file():
        raise InputError(f"{place}: no such file or folder; give a folder, a table or a .tar file")
    if tables or (place.is_file() and place.suffix.lower() in TABLES):
        items = table_items(tables[0] if tables else place, path_column, rule, media_root)
    elif media_root or path_column:
        flag = f"--media-root {media_root}" if media_root else f"--path-column {path_column}"
        raise InputError(f"{flag} needs a table, and {place} is none")
    elif _PACKED.search(place.name):
        raise InputError(f"{place}: {_UNPACK}")
    elif place.is_dir() or place.suffix.lower() == ".tar":
        items = _without_table(place, rule)
        # A name that no file can have finds as much as one that none has.
        if caption_column and items and items == _without_table(place, replace(rule, column="\0")):
            raise InputError(
                f"--caption-column {caption_column}: {place} has no table, nor media whose caption "
                "has that name in a .json (a .txt goes before it); leave it out"
            )
    else:
        raise InputError(
            f"{place}: is no input; give a folder, a table ({', '.join(TABLES)}) or a .tar file"
        )
    if not items:
        raise InputError(f"{place}: has no images or videos; name a folder that has some")
    return items


def _without_table(place: Path, rule: CaptionRule) -> list[Item]:
    """The media of a .tar file or a folder, in which .tar files hold all if there are some."""
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    tars = [path for path in files if path.suffix.lower() == ".tar"]
    packed = [path for path in files if _PACKED.search(path.name)]
    archives = [*tars, *packed] if tars else []
    items = [item for path in archives for item in tar_items(path, rule)]
    return items if tars else folder_items(place, rule)


def count_ignored(place: Path, items: Sequence[Item]) -> int:
    """The number of media in a folder that its table, or its .tar files, leave out."""
    if not place.is_dir():
        return 0
    used = {item.source.path for item in items if item.source}
    there = (item.source for item in folder_items(place, CaptionRule()))
    return sum(source is not None and source.path not in used for source in there)


def write_captions(table: Path, media: Path) -> tuple[int, int]:
    """Writes the captions of a table to text files beside the media, or those that are there.

    Args:
      table: as `table_items` takes it.
      media: folder that its paths are relative to.

    Returns:
      How many text files have changed, and how many have not.

    Raises:
      InputError: a media file is not there, or shares its caption file with one of another caption,
        or the folder has a table, which is read instead. Nothing is written then.
    """
    if table.suffix.lower() not in TABLES or not table.is_file():
        raise InputError(f"{table}: is no table; name a file that ends in {', '.join(TABLES)}")
    if not media.is_dir():
        raise InputError(
            f"{media}: is no folder; name the one that the paths of {table} are relative to. The "
            "folders of a set that lie elsewhere take a table each"
        )
    rule, root = CaptionRule(every=True), media.resolve()
    for held in (root / name for name in TABLE_NAMES):
        if held.is_file() and not held.samefile(table):
            raise InputError(
                f"{media}: its media have their captions from {held.name}, not from text files; "
                "edit it, or remove it first; nothing is written"
            )
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*"))]
    texts = CaptionFiles(names)
    stems = Counter(name.rpartition(".")[0] for name in names if suffix_of(name) in MEDIA)
    beside: dict[str | None, set[str]] = defaultdict(set)
    for name in (each for each in names if suffix_of(each) in MEDIA):
        with suppress(UnusableError):  # of a file that the table may not name
            beside[texts.of(name)].add(name)
    wanted: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for item in table_items(table, None, rule, media):
        try:
            if item.source is None:
                raise UnusableError(item.reason)
            name = item.source.path.relative_to(root).as_posix()
            text = texts.of(name)
        except UnusableError as error:
            raise InputError(f"{table}: {item.name}: {error}; nothing is written") from error
        if text is None or suffix_of(text) == ".json":  # .txt is read before .json
            stem = name.rpartition(".")[0]
            text = f"{name if stems[stem] > 1 else stem}.txt"
        wanted[text].append((name, list(map(clean, item.captions or ("",)))))
    changes = {}
    for text, files in wanted.items():
        words = files[0][1]
        if any(own != words for _, own in files) or beside[text] - {name for name, _ in files}:
            raise InputError(
                f"{table}: {files[0][0]} shares {text} with another file; give both one caption, "
                "or each a text file of its own; nothing is written"
            )
        now = (root / text).read_bytes() if text in names else b""
        known = [CaptionRule().of_sidecar(now, ".txt"), rule.of_sidecar(now, ".txt")]
        if [clean(line) for line in known[0]] != words and list(map(clean, known[1])) != words:
            changes[root / text] = words
    for path, words in changes.items():
        with replacing(path) as unfinished:
            unfinished.write_text("\n".join(words) + "\n", encoding="utf-8")
    return len(changes), len(wanted) - len(changes)


# ---------------------------------------------------------------- sets
# Several folders in one YAML file, each with its own clips and captions. A caption becomes TRIGGER,
# PREFIX + caption + SUFFIX. Orders of its tags are further captions, of which each epoch takes one.


SETS = (".yaml", ".yml")
"""Suffixes of such files."""
_CLIPS = (
    *("area", "max_enlarge", "fps", "frames", "min_frames", "stride_seconds", "max_clips"),
    *("scenes", "scene_threshold"),
)
"""Settings of the command that a folder may have of its own."""


@dataclass(frozen=True)
class MediaFolder:
    """A folder of a set, beside the settings of `MediaSettings` that it has of its own.

    Attributes:
      path: folder, table or .tar file; relative to the set.
      weight: how often an epoch has each of its samples.
      caption_dropout: share of the times that a sample is trained without its caption.
      trigger: words that stand before captions that lack them.
      prefix, suffix: text before and after each caption.
      shuffle_tags: number of orders of the tags, which commas separate; 0 leaves them.
      keep_tags: number of tags that keep their place in front.
      captions: one or all of a file; default: that of the command.
      path_column, caption_column, media_root: as the flags of the command.
    """

    path: str
    weight: float = 1.0
    caption_dropout: float = 0.0
    trigger: str = ""
    prefix: str = ""
    suffix: str = ""
    shuffle_tags: int = 0
    keep_tags: int = 0
    captions: str = ""
    path_column: str | None = None
    caption_column: str | None = None
    media_root: str | None = None

    def __post_init__(self) -> None:
        for name, fits, wanted in (
            ("weight", LEAST_WEIGHT <= self.weight <= MOST_WEIGHT, _WEIGHTS),
            ("caption_dropout", 0 <= self.caption_dropout <= 1, "from 0 to 1"),
            ("shuffle_tags", 0 <= self.shuffle_tags <= _MOST_ORDERS, f"from 0 to {_MOST_ORDERS}"),
            ("keep_tags", self.keep_tags >= 0, "0 or more"),
            ("captions", self.captions in ("", "one", "all"), "one or all"),
        ):
            if not fits:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")
        if self.keep_tags and not self.shuffle_tags:
            raise InputError(f"keep_tags is {self.keep_tags}, but shuffle_tags is 0; set it too")

    def captions_of(self, item: Item) -> tuple[str, ...]:
        """The captions of a file with what the folder adds."""
        found: dict[str, None] = {}
        for caption in map(clean, item.captions or ("",)):
            tags = [tag.strip() for tag in caption.split(",")]
            kept, rest = tags[: self.keep_tags], tags[self.keep_tags :]
            rng = random.Random(f"{item.name} {caption}")
            orders = {caption: None}
            for _ in range(_DRAWS * self.shuffle_tags):  # some are drawn again, or there are few
                if len(orders) < self.shuffle_tags:
                    orders[", ".join([*kept, *rng.sample(rest, len(rest))])] = None
            for words in (self.prefix + each + self.suffix if each else each for each in orders):
                has_trigger = re.search(rf"(?<!\w){re.escape(self.trigger)}(?!\w)", words)
                if self.trigger and not has_trigger:
                    words = f"{self.trigger}, {words}" if words else self.trigger
                found[words] = None
        return tuple(found)


_WEIGHTS = f"from {LEAST_WEIGHT:,} to {MOST_WEIGHT:,.0f}"
_MOST_ORDERS = 100
_DRAWS = 20
"""Draws for each order of the tags."""


def set_items(place: Path, settings: MediaSettings) -> list[Item]:
    """The files of all folders of a set, by their names in it.

    Args:
      place: the YAML file.
      settings: of the command.

    Raises:
      InputError: the file or a folder cannot be read, or a key or value is wrong.
    """
    found: list[Item] = []
    places: dict[PurePosixPath, Path] = {}
    for number, given in enumerate(_folders(place), 1):
        where = f"{place}: folder {number}"
        if not isinstance(given, dict) or not str(path := given.get("path") or "").strip("/"):
            raise InputError(f"{where} lacks path; give the folder's")
        try:
            clips = {name: given[name] for name in given if name in _CLIPS}
            own = _checked(MediaSettings, clips)
            rest = {name: given[name] for name in given if name not in clips}
            folder = MediaFolder(**_checked(MediaFolder, rest))
            every = (folder.captions or replace(settings, **own).captions) == "all"
            source, name = place.parent / folder.path, _name(folder.path)
            root = place.parent / folder.media_root if folder.media_root else None
            columns = folder.path_column, folder.caption_column
            items = find_items(source, *columns, every, root)
        except InputError as error:
            raise InputError(f"{where} ({path}): {error}") from error
        for item in items:
            captions = folder.captions_of(item)
            of_file = tuple(map(clean, item.captions or ("",)))
            item = replace(item, found=() if captions == of_file else of_file)
            item = replace(item, name=str(name / item.name), own=tuple(own.items()))
            item = replace(item, weight=folder.weight, dropout=folder.caption_dropout)
            found.append(replace(item, captions=captions if item.captions or captions[0] else ()))
        real = source.resolve()
        if places.setdefault(name, real) != real:
            raise InputError(
                f"{place}: {places[name]} and {real} would both be called {name} in the data "
                "folder; move or rename one"
            )
    return found


def set_places(place: Path) -> list[Path]:
    """The paths that a set names.

    Raises:
      InputError: the file cannot be read.
    """
    given = (each.get("path") for each in _folders(place) if isinstance(each, dict))
    return [place.parent / path for path in given if isinstance(path, str)]


def _folders(place: Path) -> list[object]:
    content = parse_yaml(read_text(place), str(place), "fix it")
    folders = content.get("folders") if isinstance(content, dict) else None
    if not isinstance(folders, list) or set(content) != {"folders"} or not folders:
        raise InputError(f"{place}: holds no list of folders; begin it with `folders:`")
    return folders


def _name(path: str) -> PurePosixPath:
    """What a folder of a set is called in the paths of the data folder."""
    name = PurePosixPath(path)
    return PurePosixPath(name.name) if name.is_absolute() or ".." in name.parts else name


def _checked(kind: type, given: dict[str, object]) -> dict[str, typing.Any]:
    """Values of a dataclass's fields, of the types that they have.

    Raises:
      InputError: there is no such field, or it takes another type.
    """
    hints, found = typing.get_type_hints(kind), dict(given)
    for name, value in given.items():
        if name not in hints:
            known = ", ".join([*(field.name for field in fields(MediaFolder)), *_CLIPS])
            raise InputError(f"{name} is no key of a folder; there are {known}")
        kinds = typing.get_args(hints[name]) or (hints[name],)
        if name == "area":
            found[name] = value = tuple(value) if isinstance(value, list) else (value,)
            good, kinds = all(isinstance(each, str) for each in value), (str,)
        elif name == "fps":
            found[name], good = str(value), type(value) in (int, float, str)
        else:
            good = type(value) in kinds or (float in kinds and type(value) is int)
        if not good:
            words = " or ".join(VALUE_KINDS[each.__name__] for each in kinds)
            raise InputError(f"{name} is {value!r}; give {words}")
    return found
