"""A set of several folders in one YAML file, each with its own clips and captions.

A caption becomes TRIGGER, PREFIX + caption + SUFFIX. Orders of its tags are further captions, of
which each epoch takes one.
"""

import random
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath

from alload_jax.data.prepare.captions import clean
from alload_jax.data.prepare.inputs import find_items
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.prepare.sources import Item
from alload_jax.data.selection import SourceWeight
from alload_jax.errors import InputError
from alload_jax.files import parse_yaml, read_text

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
        SourceWeight(self.path, self.weight)
        for name, fits, wanted in (
            ("caption_dropout", 0 <= self.caption_dropout <= 1, "from 0 to 1"),
            ("shuffle_tags", 0 <= self.shuffle_tags <= _MOST_ORDERS, f"from 0 to {_MOST_ORDERS}"),
            ("keep_tags", self.keep_tags >= 0, "0 or more"),
            ("captions", self.captions in ("", "one", "all"), "one or all"),
        ):
            if not fits:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

    def captions_of(self, item: Item) -> tuple[str, ...]:
        """The captions of a file with what the folder adds."""
        found: dict[str, None] = {}
        for caption in map(clean, (item.caption or "", *item.alternatives)):
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
    for number, each in enumerate(_folders(place), 1):
        found += _items(place, number, each, settings)
        path = str(typing.cast(dict[str, object], each)["path"])
        name, real = _name(path), (place.parent / path).resolve()
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


def _items(place: Path, number: int, given: object, settings: MediaSettings) -> Sequence[Item]:
    where = f"{place}: folder {number}"
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        raise InputError(f"{where} lacks path; give the folder's")
    try:
        clips = {name: given[name] for name in given if name in _CLIPS}
        own = _checked(MediaSettings, clips)
        folder = MediaFolder(
            **_checked(MediaFolder, {n: v for n, v in given.items() if n not in clips})
        )
        replace(settings, **own)
    except InputError as error:
        raise InputError(f"{where} ({given['path']}): {error}") from error
    every = (folder.captions or settings.captions) == "all"
    source = place.parent / folder.path
    root = place.parent / folder.media_root if folder.media_root else None
    items = find_items(source, folder.path_column, folder.caption_column, every, root)
    name = _name(folder.path)
    found = []
    for item in items:
        first, *others = captions = folder.captions_of(item)
        of_file = tuple(map(clean, (item.caption or "", *item.alternatives)))
        item = replace(item, found=() if tuple(captions) == of_file else of_file)
        item = replace(item, name=str(name / item.name), own=tuple(own.items()))
        item = replace(item, weight=folder.weight, dropout=folder.caption_dropout)
        caption = None if item.caption is None and not first else first
        found.append(replace(item, caption=caption, alternatives=tuple(others)))
    return found


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
            words = " or ".join(each.__name__ for each in kinds if each is not type(None))
            raise InputError(f"{name} is {value!r}; give {words}")
    return found
