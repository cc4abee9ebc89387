"""Cuts short clips out of video files, for benchmarks/sparse_quality.py.

    python benchmarks/moving_pictures.py VIDEOS --out clips.npz

Needs the extra `media`. VIDEOS is a folder of video files of any kind and length. Each is read at
about ten frames a second and made smaller, and up to two clips of 20 consecutive frames are cut out
of its middle, evenly spaced in time. Videos are held out whole: none of their clips is
trained on. A file `sources.csv` in the folder can say where videos come from and which are held
out, with the columns file, source, licence and held_out (1 or 0); files that it does not list are
then left out. Without it, every fifth file is held out.

The NPZ holds clips [N, 20, 72, 72, 3] uint8, video [N] and, as JSON, what is known of each
video.
"""

import csv
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from alload_jax.bench.harness import benchmark_parser
from alload_jax.errors import InputError, run_command
from alload_jax.files import Json

FRAMES, SIZE, FPS, MOST = 20, 72, 10, 2
"""Frames and pixels of a side of a clip, frames a second, and most clips of a video."""
_EVERY = 5
"""Without sources.csv, each fifth video is held out."""


@dataclass(frozen=True)
class Clips:
    """Clips of several videos.

    Attributes:
      pixels: [N, frames, size, size, 3] uint8.
      video: [N] int, index of each clip's video.
      videos: of each video its file, sha256, source, licence, clips, and whether it is held out.
    """

    pixels: np.ndarray
    video: np.ndarray
    videos: list[Json]

    def of(self, held_out: bool) -> np.ndarray:
        """Indices of the clips whose videos are held out, or of the others."""
        return np.flatnonzero([self.videos[n]["held_out"] == held_out for n in self.video])


def read_clips(path: Path) -> Clips:
    """Reads what this program has written."""
    with np.load(path) as file:
        return Clips(file["clips"], file["video"], json.loads(str(file["videos"])))


def main(argv: list[str]) -> int:
    """Cuts the clips and writes them."""
    parser = benchmark_parser(__doc__, "clips.npz")
    parser.add_argument("videos", type=Path, help="folder of video files")
    options = parser.parse_args(argv)
    clips: list[np.ndarray] = []
    video: list[int] = []
    videos: list[Json] = []
    for entry in listed(options.videos):
        path = options.videos / entry["file"]
        cut = cut_clips(path)
        if not cut:
            print(f"{path.name}: shorter than {FRAMES} frames, left out", file=sys.stderr)
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        video += [len(videos)] * len(cut)
        videos.append(entry | {"sha256": digest, "clips": len(cut)})
        clips += cut
    if not clips:
        raise InputError(f"{options.videos}: holds no video of {FRAMES} frames")
    np.savez_compressed(
        options.out, clips=np.stack(clips), video=np.array(video), videos=json.dumps(videos)
    )
    print(f"{options.out}: {len(clips)} clips of {len(videos)} videos")
    return 0


def listed(folder: Path) -> list[Json]:
    """The videos to read, in order, as sources.csv or the folder says."""
    table = folder / "sources.csv"
    if not table.is_file():
        files = sorted(path.name for path in folder.iterdir() if path.is_file())
        return [{"file": name, "held_out": n % _EVERY == 0} for n, name in enumerate(files)]
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row | {"held_out": row.get("held_out") == "1"} for row in rows]


def cut_clips(path: Path) -> list[np.ndarray]:
    """Up to `MOST` clips [FRAMES, SIZE, SIZE, 3] of a video; none if it is too short."""
    small = list(read_frames(path))
    number = min(MOST, len(small) // FRAMES)
    # Evenly spaced, the first and the last as far from the ends as from each other.
    free = len(small) - number * FRAMES
    starts = [round((n + 0.5) * free / max(1, number)) + n * FRAMES for n in range(number)]
    return [np.stack(small[start : start + FRAMES]) for start in starts]


def read_frames(path: Path) -> Iterator[np.ndarray]:
    """Yields the middle square of about `FPS` frames a second, [SIZE, SIZE, 3] uint8."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        step = max(1, round(float(stream.average_rate or FPS) / FPS))
        for number, frame in enumerate(container.decode(stream)):
            if number % step == 0:
                yield square(frame.to_image())


def square(picture: Image.Image) -> np.ndarray:
    """The middle square of a picture, made smaller: [SIZE, SIZE, 3] uint8."""
    side = min(picture.size)
    left, top = ((length - side) // 2 for length in picture.size)
    cut = picture.convert("RGB").crop((left, top, left + side, top + side))
    return np.asarray(cut.resize((SIZE, SIZE), Image.Resampling.LANCZOS))


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
