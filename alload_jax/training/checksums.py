"""Checksums of a checkpoint's files, by which bit rot is found before it is trained on."""

import json
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alload_jax.files import read_json, replacing

CHECKSUMS_NAME = "checksums.json"
CHECKSUMS_NOTE = {"checksums": "crc32"}
"""What the identity of a checkpoint says of its checksums, so that their loss is noticed."""
_LATER_FILES = (CHECKSUMS_NAME, "_CHECKPOINT_METADATA")
"""Files in a checkpoint's folder that change after the checksums are taken."""
_PIECE = 1 << 24
_THREADS = 4


def write_checksums(folder: Path) -> None:
    """Writes the size and CRC-32 of every file of a checkpoint into its folder."""
    files = sorted(_files(folder))
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(lambda name: _checksum(folder / name), files))
    content = {name: list(each) for name, each in zip(files, sums, strict=True)}
    with replacing(folder / CHECKSUMS_NAME) as unfinished:
        unfinished.write_text(json.dumps({"files": content}) + "\n")


def damage(folder: Path) -> str:
    """What differs from the checksums of a checkpoint; "" if nothing.

    Old versions wrote none and did not note any: a line warns that damage would not be seen.
    """
    if what := not_regular(folder):
        return what
    if not (folder / CHECKSUMS_NAME).exists():
        if _notes_checksums(folder):
            return f"{CHECKSUMS_NAME} is missing"
        print(
            f"warning: {folder}: has no checksums, as an old version wrote it; damage is not seen",
            file=sys.stderr,
        )
        return ""
    try:
        files = read_json(folder / CHECKSUMS_NAME)["files"]
        known = {str(name): (int(size), int(crc)) for name, (size, crc) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS_NAME} is damaged"
    if missing := sorted(known.keys() - set(_files(folder))):
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _checksum(folder / name), known)
        wrong = [name for name, each in zip(known, found, strict=True) if each != known[name]]
    return f"{wrong[0]} is damaged" if wrong else ""


def not_regular(folder: Path) -> str:
    """What in a checkpoint is neither a file nor a folder; "" if nothing is."""
    for path in folder.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            return f"{path.relative_to(folder)} is not a regular file"
    return ""


def _notes_checksums(folder: Path) -> bool:
    """Whether the identity of a checkpoint, as Orbax writes it, says that it has checksums."""
    try:
        identity = read_json(folder / "identity" / "metadata")
        return CHECKSUMS_NOTE.items() <= identity.items()
    except (OSError, ValueError, AttributeError):  # which reading it will report
        return False


def _files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in _LATER_FILES:
            yield str(path.relative_to(folder))


def _checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, crc
