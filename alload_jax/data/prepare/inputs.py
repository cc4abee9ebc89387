"""Finds the images and videos of an input, in an order that depends only on their names."""

from collections.abc import Sequence
from pathlib import Path

from alload_jax.data.prepare.captions import CaptionRule
from alload_jax.data.prepare.folder_inputs import folder_items
from alload_jax.data.prepare.sources import Item
from alload_jax.data.prepare.table_inputs import TABLES, table_items
from alload_jax.data.prepare.tar_inputs import tar_items
from alload_jax.errors import InputError

TABLE_NAMES = (
    *("metadata.csv", "metadata.jsonl", "metadata.parquet"),
    *("captions.csv", "captions.jsonl", "captions.parquet"),
)
"""Tables that are taken for the list of a folder's media."""


def find_items(
    place: Path,
    path_column: str | None = None,
    caption_column: str | None = None,
    every_caption: bool = False,
) -> list[Item]:
    """The items of a folder, a table or tar shards.

    Args:
      place: a folder of media, with or without a table of `TABLE_NAMES` or with .tar files; a
        .csv, .jsonl or .parquet file; or a .tar file.
      path_column, caption_column: names of the columns (or JSON keys); None finds them.
      every_caption: whether all captions of a file are taken; see `CaptionRule`.

    Raises:
      InputError: there is no such place, a table cannot be read, or nothing is found.
    """
    rule = CaptionRule(caption_column, every_caption)
    if place.is_dir():
        items = _of_folder(place, path_column, rule)
    elif not place.is_file():
        raise InputError(f"{place}: no such file or folder; give a folder, a table or a .tar file")
    elif place.suffix.lower() in TABLES:
        items = table_items(place, path_column, rule)
    elif place.suffix.lower() == ".tar":
        items = tar_items([place], rule)
    else:
        raise InputError(
            f"{place}: is no input; give a folder, a table ({', '.join(TABLES)}) or a .tar file"
        )
    if not items:
        raise InputError(f"{place}: has no images or videos; name a folder that has some")
    return items


def count_ignored(place: Path, items: Sequence[Item]) -> int:
    """The number of media in a folder that its table, or its .tar files, leave out."""
    if not place.is_dir():
        return 0
    used = {item.source.path for item in items if item.source}
    there = (item.source for item in folder_items(place, CaptionRule()))
    return sum(source is not None and source.path not in used for source in there)


def _of_folder(place: Path, path_column: str | None, rule: CaptionRule) -> list[Item]:
    for name in TABLE_NAMES:
        if (place / name).is_file():
            return table_items(place / name, path_column, rule)
    if tars := sorted(place.glob("*.tar")):
        return tar_items(tars, rule)
    return folder_items(place, rule)
