"""Clips of benchmarks/sparse_quality.py: crops to train on, and held-out ones to measure."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from moving_pictures import Clips

from alload_jax.data.store import StoreWriter

_CROP_SEED = 0


class HeldOutClips(NamedTuple):
    """Held-out clips whose loss is measured, cut to the shape of samples.

    Attributes:
      chosen: their indices among all clips.
      pixels: [N, frames, height, width, 3] uint8.
      shown: indices among them of those to restore from noise.
      number: of clips that are measured at a time; N is one or two times as many.
    """

    chosen: np.ndarray
    pixels: np.ndarray
    shown: list[int]
    number: int

    def part(self, part: int) -> np.ndarray:
        """The first clips to measure at a time (0), or the second ones (1)."""
        return self.pixels[part * self.number : (part + 1) * self.number]


def held_out_clips(
    clips: Clips, shape: tuple[int, int, int], number: int, names: list[str], shown: int
) -> HeldOutClips:
    """Chooses clips to measure, of as many videos as possible.

    Args:
      clips: of all videos.
      shape: frames, height and width of a sample.
      number: clips to measure at a time.
      names: parts of names of the videos to show first.
      shown: clips to show.
    """
    chosen = one_of_each(clips, clips.of(held_out=True))
    chosen = chosen[: min(2, len(chosen) // number) * number]
    files = [clips.videos[clips.video[n]]["file"] for n in chosen]
    wanted = [n for n, file in enumerate(files) if any(part in file for part in names)]
    order = [*wanted, *(n for n in range(len(files)) if n not in wanted)]
    return HeldOutClips(chosen, middle(clips.pixels[chosen], shape), order[:shown], number)


def write_samples(folder: Path, clips: Clips, shape: tuple[int, int, int], number: int) -> None:
    """Writes random crops of the clips that are not held out, flipped or not, as a data folder."""
    if (folder / "manifest.parquet").exists():
        return
    rng = np.random.default_rng(_CROP_SEED)
    chosen = clips.of(held_out=False)
    order = np.concatenate([rng.permutation(chosen) for _ in range(-(-number // len(chosen)))])
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for clip in order[:number]:
            room = np.subtract(clips.pixels.shape[1:4], shape)
            t, y, x = rng.integers(room + 1)
            cut = clips.pixels[clip, t : t + shape[0], y : y + shape[1], x : x + shape[2]]
            cut = cut[:, :, ::-1] if rng.integers(2) else cut
            writer.add((cut / 127.5 - 1).astype(np.float16), np.zeros(1, np.int32), size=shape)


def one_of_each(clips: Clips, chosen: np.ndarray) -> np.ndarray:
    """The chosen clips, the first of each video before the second of each."""
    turn = [int(np.sum(clips.video[:n] == clips.video[n])) for n in chosen]
    return chosen[np.lexsort((chosen, np.array(turn)))]


def middle(pixels: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """The middle of clips [N, frames, height, width, 3]."""
    t, y, x = (np.subtract(pixels.shape[1:4], shape) // 2).tolist()
    return pixels[:, t : t + shape[0], y : y + shape[1], x : x + shape[2]]


def describe_clips(path: Path, clips: Clips, measured: np.ndarray) -> dict[str, Any]:
    """What the JSON says of the data; `measured` are the held-out clips whose loss is measured."""
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "trained": len(clips.of(held_out=False)),
        "measured": len(measured),
        "measured_videos": clips.video[measured].tolist(),
        "videos": clips.videos,
    }


def to_bytes(clips: np.ndarray) -> np.ndarray:
    """Pixels of the model as bytes."""
    return np.clip((clips + 1) * 127.5, 0, 255).round().astype(np.uint8)
