"""Media in WebDataset shards: members of a .tar file whose names agree belong together."""

import os
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from alload_jax.data.prepare.captions import LONGEST_FILE, CaptionFiles, CaptionRule
from alload_jax.data.prepare.sources import (
    MEDIA,
    Item,
    Source,
    read_bytes,
    readable_name,
    suffix_of,
)
from alload_jax.data.prepare.unusable import UnusableError, short


def tar_items(tars: Sequence[Path], rule: CaptionRule) -> list[Item]:
    """The media of uncompressed .tar files, in the order of their members.

    Nothing is unpacked: members are read where they lie.

    Args:
      tars: the files, in order.
      rule: which captions are taken.

    A file that is damaged, or no uncompressed .tar, gives an item with the reason, after the items
    of the members before the damage.
    """
    return [item for path in tars for item in _items(path, rule)]


def _items(path: Path, rule: CaptionRule) -> list[Item]:
    members, damage = _members(path)
    named = [(_name(member), member) for member in members if not member.isdir()]
    texts, by_name = CaptionFiles([name for name, _ in named], by_first_dot=True), dict(named)

    def captions(name: str) -> list[str]:
        text = texts.of(name)
        if text is None:
            return []
        data = read_bytes(_source(path, by_name[text]), LONGEST_FILE)
        return rule.of_sidecar(data, suffix_of(text))

    items = [
        _item(path, member, partial(captions, name))
        for name, member in named
        if suffix_of(name) in MEDIA
    ]
    return [*items, Item(readable_name(path.name), None, reason=damage)] if damage else items


def _members(path: Path) -> tuple[list[tarfile.TarInfo], str]:
    """The members of a .tar file up to its end or its damage, and what the damage is."""
    members: list[tarfile.TarInfo] = []
    try:
        with tarfile.open(path, "r:") as archive:
            members.extend(archive)
    except (tarfile.TarError, OSError, ValueError) as error:
        return members, f"cannot be read as an uncompressed .tar ({short(error)})"
    return members, ""


def _item(path: Path, member: tarfile.TarInfo, captions: Callable[[], list[str]]) -> Item:
    name = readable_name(f"{path.name}/{member.name}")
    try:
        source = _source(path, member)
        if not source.size:
            raise UnusableError("empty file (0 bytes)")
        return Item.captioned(name, source, captions())
    except UnusableError as error:
        return Item(name, None, reason=str(error))


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


def _name(member: tarfile.TarInfo) -> str:
    """A member's name, the same for ./clip.mp4 and clip.mp4."""
    return str(PurePosixPath(member.name))
