"""A folder in which everything is wrong that can be: the run goes on, and writes nowhere else."""

import io
import os
import struct
import tarfile
import zlib

import pytest
from media_helpers import (
    moving_frames,
    prepare,
    rows,
    skipped,
    stored,
    write_audio,
    write_video,
)
from PIL import Image

from alload_jax.data.manifest import read_manifest


def png_chunks(width, height, *more):
    """A PNG file of an 8-bit RGB header, chunks, and an end."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", header), *more, (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + name + body
        data += struct.pack(">I", zlib.crc32(name + body))
    return data


def gif_bomb():
    """A GIF file of 65,535 × 65,535 pixels."""
    screen = struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + screen + frame + b";"


def tiff_bomb():
    file = io.BytesIO()
    Image.new("L", (16, 16)).save(file, "TIFF")
    return file.getvalue().replace(struct.pack("<HHII", 256, 4, 1, 16), struct.pack(
        "<HHII", 256, 4, 1, 2**31 - 1))  # fmt: skip


def caption_of(number):
    """JSON captions that are no plain text."""
    deep = "[" * 100_000 + "]" * 100_000
    return [deep, "NaN", '{"caption": {"a": 1}}', '{"caption": ["\\u0000\\u001b[31m red"]}'][number]


@pytest.fixture
def hostile(tmp_path):
    """The folder, beside which lies what must not be read or changed."""
    folder = tmp_path / "media"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    good = Image.new("RGB", (40, 40), (9, 99, 199))
    text = (b"zTXt", b"note\0\0" + zlib.compress(bytes(80_000_000)))
    files = {
        "zero.mp4": b"",
        "zero.png": b"",
        "bomb.png": png_chunks(60000, 60000, (b"IDAT", zlib.compress(bytes(99)))),
        "text bomb.png": png_chunks(32, 32, text, (b"IDAT", zlib.compress(bytes(97 * 32)))),
        "bomb.gif": gif_bomb(),
        "bomb.tif": tiff_bomb(),
        "text.mp4": b"a caption with the wrong suffix",
        "script.mkv": b"#!/bin/sh\ntouch /tmp/owned\n",
        "playlist.ts": b"#EXTM3U\n#EXTINF:1,\n../secret.txt\n",
        "line\nbreak \x1b[31m.png": b"no image",
        "\u202e\u2066gnp.exe.png": b"no image",
        "-rf.png": b"no image",
        "x" * 250 + ".png": b"no image",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "folder.mp4").mkdir()
    (folder / "link.png").symlink_to("../secret.txt")
    (folder / "up").symlink_to("..")
    os.mkfifo(folder / "pipe.mp4")
    write_audio(folder / "sound.mp4")
    for number in range(4):
        good.save(folder / f"good {number}.png")
        (folder / f"good {number}.json").write_text(caption_of(number))
    with open(os.fsencode(folder) + b"/\xff.png", "wb") as file:  # a name that is not UTF-8
        good.save(file, "PNG")
    return folder


def test_a_hostile_folder_harms_nothing(hostile, tmp_path):
    before = contents_without_pipes(tmp_path)
    report = prepare(hostile, tmp_path / "out", workers=2)
    after = contents_without_pipes(tmp_path)
    assert {name: data for name, data in after.items() if not name.startswith("out/")} == before
    found = skipped(tmp_path / "out")
    for name in ("bomb.png", "bomb.gif", "bomb.tif", "zero.mp4", "link.png", "up", "pipe.mp4",
                 "sound.mp4", "script.mkv", "playlist.ts", "good 0.png"):  # fmt: skip
        assert name in found
    assert all("\n" not in reason for reason in found.values())
    captions = [row["caption"] for row in rows(tmp_path / "out/manifest.parquet")]
    assert sorted(captions) == ["", "", "", "[31m red"]
    assert report.used == 4


def contents_without_pipes(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "up" not in path.relative_to(folder).parts
    }


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt"),
    [("a.mkv", "ffv1", "bgr0"), ("a.gif", "gif", "rgb8"), ("a.mp4", "mpeg4", "yuv420p")],
)
def test_a_video_of_one_frame_is_one_picture(tmp_path, name, codec, pix_fmt):
    (tmp_path / "media").mkdir()
    write_video(tmp_path / "media" / name, moving_frames(1), codec=codec, pix_fmt=pix_fmt)
    for flags in ({}, {"scenes": True}):
        prepare(tmp_path / "media", tmp_path / f"out {len(flags)}", **flags)
        (clip,) = stored(tmp_path / f"out {len(flags)}")
        assert clip.shape == (1, 32, 32, 3)


def test_tables_and_tars_with_strange_names_are_used(tmp_path):
    """Spaces, other scripts, commas and quotes; in a table, and in a .tar file."""
    media, tar = tmp_path / "ein Ordner, 写真", tmp_path / "été.tar"
    media.mkdir()
    names = ["a b.png", '猫, "x".png', "é/ü ü.png"]
    lines = ["file_name,text"]
    with tarfile.open(tar, "w") as archive:
        for number, name in enumerate(names):
            (media / name).parent.mkdir(exist_ok=True)
            Image.new("RGB", (32, 32)).save(media / name)
            quoted = name.replace('"', '""')
            lines.append(f'"{quoted}","caption, {number}"')
            archive.add(media / name, name)
    (media / "metadata.csv").write_text("\n".join(lines), encoding="utf-8")
    for source, out in ((media, tmp_path / "of table"), (tar, tmp_path / "of tar")):
        prepare(source, out)
        assert len(read_manifest(out)) == 3
    captions = [row["caption"] for row in rows(tmp_path / "of table/manifest.parquet")]
    assert captions == [f"caption, {number}" for number in range(3)]
