"""Files that are not what they should be, and the commands that read them."""

import io
import json
import os
import shutil
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Damage = Callable[[Path], Any]
"""Puts something in the place of a file or folder."""


def _link_to(target: str) -> Damage:
    return lambda path: path.symlink_to(target)


PLACES: dict[str, Damage] = {
    "fifo": os.mkfifo,
    "dangling": _link_to("/nowhere/at/all"),
    "loop": lambda path: path.symlink_to(path.name),
    "zero": _link_to("/dev/zero"),
    "null": _link_to("/dev/null"),
    "folder": Path.mkdir,
}
"""What may stand where a file should be."""


# ---------------------------------------------------------------- contents


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


def _header(text: Any, size: int | None = None) -> bytes:
    """A safetensors file of this header."""
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(data) if size is None else size) + data


def _tensor(dtype: str = "F32", shape: tuple[int, ...] = (1,), end: int = 4) -> bytes:
    fields = {"dtype": dtype, "shape": shape, "data_offsets": (0, end)}
    return _header({"x.lora_A.weight": fields}) + bytes(4)


def _parquet(columns: dict[str, Any], notes: dict[bytes, bytes] | None = None) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(notes), file)
    return file.getvalue()


def _tar(
    name: str = "a.png", kind: bytes = tarfile.REGTYPE, data: bytes = b"x", **of: Any
) -> bytes:
    """A shard of one member, whose header may say something else of it."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, "/etc/passwd"
    for field, value in of.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data.ljust(512, b"\0") + bytes(1024)


_DEEP: dict[str, bytes | Damage] = {
    "deep": b"[" * 100_000,
    "deep_fields": b'{"a":' * 5000,
    "huge": _huge,
}
_PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\x7f\xff\xff\xff\x7f\xff\xff\xff\x08\x02\0\0\0\0\0\0\0"
_YAML: dict[str, bytes | Damage] = {
    **_DEEP,
    "number": b"run: {seed: 9223372036854775808}",
    "not_a_number": b"run: .nan\ndata: .nan",
    "itself": b"a: &a [*a]",
    "binary": b"a: !!binary aGk=",
    "no_value": b'a: !!int ""',
    "key": b"? [1]\n: 2",
    "utf_16": b"\xff\xfea\0",
    "nul": b"\0" * 100,
}
_JSON: dict[str, bytes | Damage] = {
    **_DEEP,
    "many": b"[" + b"0," * 1_000_000 + b"0]",
    "number": b'{"step": 9223372036854775808, "height": 9223372036854775808}',
    "infinite": b'{"step": 1e999, "height": NaN}',
    "digits": b"1" * 5000,
    "half": b'{"prompt": "\\ud800", "out": "x"}',
    "terminal": b'{"\\u001b[31m\\n": "' + b"x" * 10_000 + b'"}',
    "nothing": b"null",
    "list": b"[[1, 2], {}]",
}
_LENGTHS = {
    "edge": [2**63 - 1, 1],
    "negative": [-1, 0],
    "none": [None, 3],
    "not_a_number": [float("nan"), 1.0],
    "infinite": [float("inf"), 1.0],
    "lists": [["a"], ["b"]],
}
_CSV: dict[str, bytes | Damage] = {
    "huge": _huge,
    "number": b"seq_len\n99999999999999999999\n",
    "edge": b"seq_len\n9223372036854775807\n1\n",
    "infinite": b"seq_len\nnan\ninf\n1e308\n",
    "words": b"seq_len\nx\n",
    "digits": b"seq_len\n" + b"1" * 200_000,
    "fields": b"frames,height,width\n1,64\n1,64,64,64\n",
    "quote": b'file_name,caption\n"a.png,x\n',
    "outside": b"file_name,caption\n../../x.png,x\n/etc/passwd,y\n",
    "nul": b"file_name,caption\na\0.png,x\n",
}
_PARQUET: dict[str, bytes | Damage] = {
    **{name: _parquet({"seq_len": column}) for name, column in _LENGTHS.items()},
    "sizes": _parquet({"frames": [2**62], "height": [2**62], "width": [2**62]}),
    "outside": _parquet({"file_name": ["../../x.png", "a\x1b[31m\n.png"], "caption": ["\0", None]}),
    "notes": _parquet({"a": [1]}, {b"alload": b"[" * 50_000}),
    "torn": _parquet({"seq_len": [1]})[:-20],
    "garbage": b"PAR1" + b"\xff" * 100 + b"PAR1",
}
_TENSORS: dict[str, bytes | Damage] = {
    "deep": _header(b"[" * 50_000),
    "header": _header(b"{}", 2**63),
    "offsets": _tensor(end=2**62),
    "shape": _tensor(shape=(2**62, 2**62)),
    "negative": _tensor(shape=(-1,)),
    "dtype": _tensor("F99"),
    "torn": _tensor()[:-2],
    "huge": _huge,
    "empty": b"",
}
_TARS: dict[str, bytes | Damage] = {
    "absolute": _tar("/etc/a.png"),
    "above": _tar("../../a.png"),
    "above_within": _tar("a/../../a.png"),
    "terminal": _tar("a\x1b[31m\n.png"),
    "huge_member": _tar(size=2**62),
    "negative_member": _tar()[:124] + b"\xff" * 12 + _tar()[136:],
    "symbolic_link": _tar(kind=tarfile.SYMTYPE),
    "hard_link": _tar(kind=tarfile.LNKTYPE),
    "fifo_member": _tar(kind=tarfile.FIFOTYPE),
    "device": _tar("a.mp4", tarfile.CHRTYPE),
    "sparse": _tar(kind=tarfile.GNUTYPE_SPARSE),
    "long_name": _tar(kind=tarfile.GNUTYPE_LONGNAME, size=2**40),
    "pax": _tar(kind=tarfile.XHDTYPE, data=b"99999999999 path=a.png\n"),
    "torn": _tar()[:300],
    "torn_member": _tar(size=4096)[:1024],
    "zeros": bytes(10_240),
    "pixels": _tar(data=_PICTURE),
    "garbage": bytes(range(256)) * 8,
    "huge": _huge,
}
_MEDIA: dict[str, bytes | Damage] = {
    "pixels.png": _PICTURE,
    "torn.png": _PICTURE[:20],
    "empty.jpg": b"",
    "garbage.gif": b"GIF89a" + b"\xff" * 40,
    "garbage.webp": b"RIFF\xff\xff\xff\x7fWEBPVP8 " + b"\xff" * 40,
    "atoms.mp4": b"\0\0\0\x20ftypisom" + b"\xff" * 100,
    "atom.mp4": b"\0\0\0\x01ftypisom" + struct.pack(">Q", 2**63) + bytes(40),
    "garbage.mkv": b"\x1aE\xdf\xa3" + b"\xff" * 100,
    "garbage.avi": b"RIFF\xff\xff\xff\xffAVI LIST" + b"\xff" * 60,
    "text.mov": b"words",
    "deep.svg": b"<svg>" * 10_000,
}
CONTENTS: dict[str, Mapping[str, bytes | Damage]] = {
    "": {},
    ".yaml": _YAML,
    ".json": _JSON,
    ".jsonl": _JSON,
    ".csv": _CSV,
    ".parquet": _PARQUET,
    ".safetensors": _TENSORS,
    ".tar": _TARS,
}
"""By suffix of the file and by name."""

# ---------------------------------------------------------------- folders that were good


def _columns(**columns: Any) -> Damage:
    """Replaces columns of a manifest, each by a value for all of its rows."""

    def damage(folder: Path) -> None:
        path = folder / "manifest.parquet"
        table = pq.read_table(path)
        for name, value in columns.items():
            column = pa.array([value] * len(table))
            table = table.set_column(table.column_names.index(name), name, column)
        pq.write_table(table, path)

    return damage


def _notes(notes: bytes) -> Damage:
    """Replaces all that a manifest says of its store."""

    def damage(folder: Path) -> None:
        path = folder / "manifest.parquet"
        table = pq.read_table(path)
        known = table.schema.metadata or {}
        pq.write_table(table.replace_schema_metadata(dict.fromkeys(known, notes)), path)

    return damage


def _file(name: str, content: bytes | Damage) -> Damage:
    """Puts something in the place of the file of a folder that matches `name`."""

    def damage(folder: Path) -> None:
        (path,) = folder.glob(name)
        path.unlink()
        put(path, content)

    return damage


def _cut(name: str, share: float) -> Damage:
    def damage(folder: Path) -> None:
        (path,) = folder.glob(name)
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def put(path: Path, content: bytes | Damage) -> None:
    """Writes a content, or what a function puts there."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)


_INSTEAD = {name: damage for name, damage in PLACES.items() if name != "folder"}
_MANIFESTS: dict[str, Damage] = {
    **{name: _file("manifest.parquet", damage) for name, damage in _INSTEAD.items()},
    "half": _cut("manifest.parquet", 0.5),
    "empty": _cut("manifest.parquet", 0),
    "no_columns": _file("manifest.parquet", _parquet({"a": [1]})),
    "negative_index": _columns(index=-1),
    "words_index": _columns(index="x"),
    "no_index": _columns(index=None),
    "infinite_frames": _columns(frames=float("inf")),
    "edge_height": _columns(height=2**62),
    "outside": _columns(shard="../../../etc/passwd"),
    "absolute": _columns(shard="/etc/passwd"),
    "terminal": _columns(shard="\x1b[31m\n" + "x" * 5000),
    "deep_notes": _notes(b"[" * 50_000),
    "number_notes": _notes(b'{"format": 9223372036854775808}'),
    "list_notes": _notes(b"[]"),
}
_SHARD = "*.arrayrecord"
_SHARDS: dict[str, Damage] = {
    **{name: _file(_SHARD, damage) for name, damage in _INSTEAD.items()},
    "half": _cut(_SHARD, 0.5),
    "empty": _cut(_SHARD, 0),
    "zeros": _file(_SHARD, bytes(200_000)),
    "garbage": _file(_SHARD, bytes(range(256)) * 800),
    "huge": _file(_SHARD, _huge),
    "edge_index": _columns(index=2**63 - 1),
}
_RUNS: dict[str, Damage] = {
    **{f"{name}_config": _file("config.yaml", damage) for name, damage in _INSTEAD.items()},
    "deep_config": _file("config.yaml", b"[" * 100_000),
    "huge_config": _file("config.yaml", _huge),
    "no_config": lambda folder: (folder / "config.yaml").unlink(),
    "no_checkpoints": lambda folder: shutil.rmtree(folder / "checkpoints"),
    "file_of_checkpoints": lambda folder: _replaced(folder / "checkpoints", Path.touch),
    "loop_of_checkpoints": lambda folder: _replaced(folder / "checkpoints", PLACES["loop"]),
}


def _replaced(folder: Path, damage: Damage) -> None:
    shutil.rmtree(folder)
    damage(folder)


FOLDERS = {"manifests": _MANIFESTS, "shards": _SHARDS, "runs": _RUNS}
"""What is damaged of data folders and of runs."""

# ---------------------------------------------------------------- commands


def reading(readers: dict[str, list[str]]) -> list[str]:
    """Command lines that read the files and folders of `write_hostile`, once each.

    Args:
      readers: commands by the suffix of the file that they read, or by the kind of the folder.
    """
    files = {suffix: [*PLACES, *content] for suffix, content in CONTENTS.items()}
    files |= {kind: list(damages) for kind, damages in FOLDERS.items()} | {"media": list(_MEDIA)}
    return [
        command.replace("{file}", f"{{work}}/{_place(kind, name)}")
        for kind, names in files.items()
        for command in readers[kind]
        for name in names
    ]


def _place(kind: str, name: str) -> str:
    """Where a file or folder lies."""
    if kind in CONTENTS:
        return f"files/{name}{kind}"
    return f"{kind}/{name}"


def write_hostile(folder: Path, data: Path, run: Path) -> None:
    """Writes all of them; `data` and `run` are a good data folder and run."""
    for kind in ("files", "media", *FOLDERS):
        (folder / kind).mkdir()
    for suffix, contents in CONTENTS.items():
        for name, content in {**PLACES, **contents}.items():
            put(folder / _place(suffix, name), content)
    for name, content in _MEDIA.items():
        (folder / "media" / name).mkdir()
        put(folder / "media" / name / name, content)
    for kind, damages in FOLDERS.items():
        for name, damage in damages.items():
            shutil.copytree(run if kind == "runs" else data, folder / kind / name)
            damage(folder / kind / name)
