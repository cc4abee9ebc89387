"""Writes tiny images and videos, and reads what was prepared from them."""

import os
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet
from patience import wait_until
from PIL import Image

from alload_jax import cli
from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare.inputs import find_items
from alload_jax.data.prepare.pipeline import prepare_media
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.store import StoreReader

SMALL = {"area": ("32x32",), "frames": 9, "files_per_shard": 3}
"""Settings for tiny clips."""


def hold(place, media, out, *flags):
    """A preparation that waits where so many shards are finished, until `held` is gone.

    Returns a function of that number that starts it, and the path `held`.
    """
    held = place / "held"
    held.touch()
    program = [sys.executable, str(Path(__file__).with_name("held_prepare.py")), "prepare", "media"]
    program += [str(media), "--out", str(out), "--area", "32x32", "--frames", "9"]
    paths = {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start(shards):
        own = os.environ | paths | {"HELD": f"{shards} {held}"}
        command = [*program, "--files-per-shard", "1", *flags]
        begun = subprocess.Popen(command, env=own, start_new_session=True, **pipes)
        wait_until(lambda: finished_shards(out) >= shards, begun)
        return begun

    return start, held


def finished_shards(out):
    """How many shards of a data folder in work are finished."""
    return len(list(out.with_name(f"{out.name}.partial").glob("shard-*.parquet")))


def make_media(folder):
    """Pictures, videos, and files that cannot be used: ten in all."""
    for number in range(4):
        write_video(folder / f"clip {number}.mkv", moving_frames(9 + number))
        (folder / f"clip {number}.txt").write_text(f"clip number {number}")
        Image.new("RGB", (40, 40 + number), (number, 0, 0)).save(folder / f"image{number}.png")
    (folder / "bad.mp4").write_bytes(b"")
    (folder / "worse.png").write_bytes(b"nothing")
    return folder


def grey_frames(levels, height=32, width=32):
    """Frames of one grey level each."""
    return [np.full((height, width, 3), level, np.uint8) for level in levels]


def moving_frames(count, height=32, width=32):
    """Frames whose left part grows from left to right."""
    frames = grey_frames([20] * count, height, width)
    for number, frame in enumerate(frames):
        frame[:, : 1 + number * (width - 1) // count] = 200
    return frames


def write_video(path, frames, rate=16, codec="ffv1", pix_fmt="bgr0", seconds=None, **options):
    """Writes frames; `seconds` are the times at which they are shown, without which rate counts."""
    with av.open(str(path), "w", **options.pop("container", {})) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        if seconds is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(
                array, format="rgb24" if array.shape[-1] == 3 else "rgba"
            )
            if seconds is not None:
                frame.pts, frame.time_base = round(seconds[number] * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_audio(path, seconds=0.2):
    """Writes silence."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, round(16000 * seconds)), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def set_display_matrix(path, matrix):
    """Overwrites (a, b, c, d) of the display matrix in the track header of an MP4 file."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 44
    a, b, c, d = (value << 16 for value in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


def prepare(
    source, out, workers=1, report=None, engine=None, on_files=None, update=False, **changes
):
    """Prepares a folder of tiny clips; returns what became of the files."""
    settings = MediaSettings(**SMALL | changes)
    items = find_items(source, every_caption=settings.captions == "all")
    options = {"workers": workers, "report": report, "engine": engine, "update": update}
    options |= {} if on_files is None else {"on_files": on_files}
    return prepare_media(items, out, settings, **options)


def stored(out):
    """The pixels of each sample from 0 to 255: [frames, height, width, 3] float32."""
    manifest = read_manifest(out)
    reader = StoreReader(manifest)
    latents = (reader.read(number)["latents"] for number in range(len(manifest)))
    return [(each.astype(np.float32) + 1) * 127.5 for each in latents]


def levels_of(clip):
    """The mean grey level of each frame, as whole numbers."""
    return np.round(clip.mean(axis=(1, 2, 3))).astype(int).tolist()


def rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def skipped(out):
    """The reason for each skipped file."""
    found = rows(out / "skipped.parquet")
    return {row["path"]: row["reason"] for row in found if not row["used"]}


def changed(out):
    """What was changed in each file that is used."""
    found = {}
    for row in rows(out / "skipped.parquet"):
        if row["used"]:
            found.setdefault(row["path"], set()).add(row["reason"])
    return found
