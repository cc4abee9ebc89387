"""Media in WebDataset shards: members of a .tar file that share a stem belong together."""

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from alload_jax.data.prepare.captions import LONGEST_FILE, SIDECARS, CaptionRule
from alload_jax.data.prepare.sources import MEDIA, Item, Source, read_bytes, readable_name
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
    texts = {
        _stem(member.name): member
        for suffix in reversed(SIDECARS)
        for member in reversed(members)
        if _suffix(member.name) == suffix
    }
    items = [
        _item(path, member, texts.get(_stem(member.name)), rule)
        for member in members
        if _suffix(member.name) in MEDIA and not member.isdir()
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


def _item(
    path: Path, member: tarfile.TarInfo, text: tarfile.TarInfo | None, rule: CaptionRule
) -> Item:
    name = readable_name(f"{path.name}/{member.name}")
    try:
        source = _source(path, member)
        if not source.size:
            raise UnusableError("empty file (0 bytes)")
        return Item.captioned(name, source, [] if text is None else _captions(path, text, rule))
    except UnusableError as error:
        return Item(name, None, reason=str(error))


def _captions(path: Path, text: tarfile.TarInfo, rule: CaptionRule) -> list[str]:
    data = read_bytes(_source(path, text), LONGEST_FILE)
    return rule.of_sidecar(data, _suffix(text.name))


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


def _stem(name: str) -> str:
    """The name up to the first dot of its last part, as WebDataset groups members."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.partition('.')[0]}"


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()
