"""Media in a folder, with captions in .txt or .json beside each file."""

import os
from pathlib import Path

from alload_jax.data.prepare.captions import LONGEST_FILE, SIDECARS, CaptionFiles, CaptionRule
from alload_jax.data.prepare.sources import (
    MEDIA,
    Item,
    checked_source,
    read_bytes,
    readable_name,
    suffix_of,
)
from alload_jax.data.prepare.unusable import UnusableError

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
    names, items = [], []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in (*files, *(one for one in folders if (Path(parent) / one).is_symlink())):
            if not name.startswith("."):
                names.append((Path(parent) / name).relative_to(root).as_posix())
    texts = CaptionFiles(names)
    for name in sorted(names, key=os.fsencode):
        if suffix_of(name) in MEDIA or suffix_of(name) not in _SILENT:
            items.append(_item(root, name, texts, rule))
    return items


def _item(root: Path, name: str, texts: CaptionFiles, rule: CaptionRule) -> Item:
    suffix = suffix_of(name)
    try:
        if suffix not in MEDIA:
            linked = (root / name).is_dir()
            reason = "link to a folder, which is not followed" if linked else ""
            raise UnusableError(reason or f"suffix {suffix or 'missing'}: not an image or video")
        source = checked_source(root, name)
        captions = _captions(root, texts.of(name), rule)
        return Item.captioned(readable_name(name), source, captions)
    except UnusableError as error:
        return Item(readable_name(name), None, reason=str(error))


def _captions(root: Path, text: str | None, rule: CaptionRule) -> list[str]:
    """The captions in the file of that name; none if there is no file."""
    if text is None:
        return []
    if (root / text).is_file() and not (root / text).stat().st_size:
        return [""]
    try:
        data = read_bytes(checked_source(root, text), LONGEST_FILE)
    except UnusableError as error:
        raise UnusableError(f"its caption {readable_name(text)}: {error}") from error
    return rule.of_sidecar(data, suffix_of(text))
