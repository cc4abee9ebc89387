"""Images and videos of real handwritten digits: the data of the default run.

The images are scikit-learn's bundled ones (1,797 scans of 8×8 pixels; E. Alpaydin and C. Kaynak,
Optical Recognition of Handwritten Digits, UCI). Clips show one or two digits that move, each in its
own part of the canvas.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from typing_extensions import override

from alload_jax.data.datasets import Dataset
from alload_jax.data.record import fold_frames
from alload_jax.data.store import StoreWriter
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.planning.samples import Triple
from alload_jax.processes import waits

DIGIT = 8
"""Height and width of a digit, in pixels."""

Motion = Literal["circle", "drift"]
"""How digits move: all clockwise from the top of a circle, at one angular speed; or on straight
lines with bounces, each with a place, speed and turn of its own."""

_MAX_TURN = np.deg2rad(20.0)
_PAIRS = 0.8
"""`Digits.pairs` of folders that do not name it."""
_SWAY = 3.0
"""Pixels by which a digit moves in a clip that is as small as itself."""
_ROUND = 20
"""Frames of a whole circle."""
_REACH = 0.75
"""Diameter of a circle over the pixels by which a digit can move."""


@dataclass(frozen=True)
class Digits(Dataset):
    """Still and moving digits; see `Dataset`.

    Attributes:
      name: `digits`.
      mix: (frames, height, width, count) of the samples, sizes in pixels; frames 4n + 1, height and
        width even and at least 8.
      seed: seed of digits, positions and motion.
      motion: how the digits of clips move: `circle`, which is the same in all clips of a size, or
        `drift`, which is harder to learn.
      frames_per_latent: frames of a latent, 1 or 4, which is also the number of its channels; 4 as
        in the VAEs of video models.
    """

    name: Literal["digits"] = "digits"
    mix: tuple[tuple[int, int, int, int], ...] = (
        (1, 8, 8, 12000),
        (1, 8, 16, 5000),
        (1, 16, 16, 2000),
        (5, 8, 8, 600),
        (5, 8, 16, 300),
        (5, 16, 16, 300),
        (9, 8, 8, 400),
        (9, 8, 16, 200),
        (9, 16, 16, 200),
        (17, 8, 8, 400),
        (17, 16, 16, 1600),
        (17, 16, 32, 100),
    )
    seed: int = 0
    motion: Motion = "circle"
    frames_per_latent: Literal[1, 4] = 4
    pairs: float = _PAIRS

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InputError(f"data.dataset.seed is {self.seed}; it must be 0 or more")
        if not 0 <= self.pairs <= 1:
            raise InputError(f"data.dataset.pairs is {self.pairs}; it must be from 0 to 1")
        if not self.mix:
            raise InputError("data.dataset.mix is empty; give at least one (frames, height, ...)")
        for row in self.mix:
            frames, height, width, count = row
            is_even = height % 2 == 0 and width % 2 == 0
            if frames % 4 != 1 or min(height, width) < DIGIT or not is_even or count < 1:
                raise InputError(
                    f"data.dataset.mix has {row}; frames must be 4n + 1, height and width even and "
                    f"at least {DIGIT}, the count at least 1"
                )

    @override
    def origin(self) -> Json:
        content: Json = {"mix": [list(row) for row in self.mix], "seed": self.seed}
        # Older folders name none of these: they hold what is left out here.
        if (self.motion, self.frames_per_latent) != ("drift", 1):
            content |= {"motion": self.motion, "frames_per_latent": self.frames_per_latent}
        if self.pairs != _PAIRS:
            content["pairs"] = self.pairs
        return {"digits": content}

    @override
    @waits("for the data set to be written")
    def write(self, folder: str | Path) -> None:
        images, labels = load_digits()
        stride = (self.frames_per_latent, 1, 1)
        origin = self.origin()
        with StoreWriter(folder, vae_stride=stride, origin=origin, mode="resume") as writer:
            # The first ones are there if an earlier call was interrupted.
            for clip, classes, size in islice(self._samples(images, labels), writer.written, None):
                writer.add(fold_frames(clip, self.frames_per_latent), classes, size)

    def _samples(
        self, images: np.ndarray, labels: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, Triple]]:
        """Clips with their classes and sizes, in the order of the mix."""
        rng = np.random.default_rng(self.seed)
        for frames, height, width, count in self.mix:
            # One digit for each sample, or two in most samples that fit two.
            fits_two, passes = max(height, width) >= 2 * DIGIT, -(-2 * count // len(labels))
            order = np.concatenate([rng.permutation(len(labels)) for _ in range(passes)])
            digits = [2 if fits_two and rng.random() < self.pairs else 1 for _ in range(count)]
            for number, shown in enumerate(digits):
                chosen = order[shown * number :][:shown]
                clip = render_clip(images[chosen], frames, height, width, rng, self.motion)
                yield clip, labels[chosen], (frames, height, width)


def require_scikit_learn() -> None:
    """Raises InputError unless scikit-learn is installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise InputError("the digits need the package scikit-learn; install alload-jax[digits]")


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the real digits: images [1797, 8, 8] float32 in −1 to 1, labels [1797] int32.

    Raises:
      InputError: scikit-learn, whose they are, is not installed.
    """
    require_scikit_learn()
    from sklearn.datasets import load_digits as load  # slow to import

    images, labels = load(return_X_y=True)
    return (images.reshape(-1, DIGIT, DIGIT) / 8 - 1).astype(np.float32), labels.astype(np.int32)


def render_clip(
    digits: np.ndarray,
    frames: int,
    height: int,
    width: int,
    rng: np.random.Generator,
    motion: Motion,
) -> np.ndarray:
    """Renders digits that move, each in its own part of a black canvas.

    A single still digit on a canvas of its size is the unmodified scan.

    Args:
      digits: [n, 8, 8] float32 in −1 to 1; n is 1 or 2.
      frames, height, width: size of the clip; height and width in pixels.
      rng: random generator for positions and motion.
      motion: how they move.

    Returns:
      [frames, height, width, 1] float16 in −1 to 1.
    """
    clip = np.full((frames, height, width), -1.0, np.float32)
    along = int(width >= height)
    area = np.array([height, width], np.float64)
    area[along] /= len(digits)
    for n, digit in enumerate(digits):
        path = _MOTIONS[motion](frames, area - DIGIT, rng)
        path[:, along] += n * area[along]
        np.maximum(clip, _place(digit, path, height, width), out=clip)
    return clip[..., None].astype(np.float16)


def _circle(frames: int, free: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Like `_drift`, on a circle stretched to the free space; stills stand near its centre."""
    if frames == 1:
        start = free / 2 + rng.uniform(-1, 1, 2) * np.minimum(1, free / 2)
        return np.append(start, 0.0)[None]
    radius = np.where(free > 0, _REACH * free, _SWAY) / 2
    angle = 2 * np.pi / _ROUND * np.arange(frames)[:, None]
    path = free / 2 + radius * np.concatenate([-np.cos(angle), np.sin(angle)], axis=1)
    return np.concatenate([path, np.zeros((frames, 1))], axis=1)


def _drift(frames: int, free: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns (top, left, angle) per frame, [frames, 3]; motion is linear with reflections.

    Args:
      frames: number of frames.
      free: [2], pixels by which the digit can move in height and width.
      rng: random generator.
    """
    sway = np.where(free > 0, 0.0, _SWAY if frames > 1 else 0.0)
    start = (free + sway) / 2 + rng.uniform(-1, 1, 2) * np.minimum(1, free / 2)
    speed = rng.uniform(0.4, 1.0, 2) * rng.choice([-1, 1], 2)
    turn = rng.uniform(0.03, 0.08) * rng.choice([-1, 1])
    time = np.arange(frames)[:, None]
    path = _reflect(start + speed * time, free + sway) - sway / 2
    angle = _reflect(_MAX_TURN + turn * time, np.array([2 * _MAX_TURN])) - _MAX_TURN
    return np.concatenate([path, angle], axis=1)


_MOTIONS: dict[str, Callable[[int, np.ndarray, np.random.Generator], np.ndarray]] = {
    "circle": _circle,
    "drift": _drift,
}


def _reflect(value: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Reflects values at 0 and `size` until they lie between."""
    period = np.maximum(2 * size, 1e-9)
    return np.where(size > 0, size - np.abs(np.mod(value, period) - size), 0.0)


def _place(digit: np.ndarray, path: np.ndarray, height: int, width: int) -> np.ndarray:
    """Renders the digit along its path, rotated about its centre, with bilinear interpolation.

    Args:
      digit: [8, 8].
      path: [frames, 3] of (top, left, angle).

    Returns:
      [frames, height, width]; −1 outside the digit.
    """
    top, left, angle = (column[:, None, None] for column in path.T)
    y = np.arange(height)[:, None] - top - (DIGIT - 1) / 2
    x = np.arange(width) - left - (DIGIT - 1) / 2
    # One empty border pixel lets the digit fade into the canvas; another is read at the far edge.
    framed = np.pad(digit, (1, 2), constant_values=-1.0)
    centre = (DIGIT - 1) / 2 + 1
    rows = np.clip(np.cos(angle) * y - np.sin(angle) * x + centre, 0, DIGIT + 1)
    columns = np.clip(np.sin(angle) * y + np.cos(angle) * x + centre, 0, DIGIT + 1)
    i, j = rows.astype(int), columns.astype(int)
    u, v = rows - i, columns - j
    upper = (1 - v) * framed[i, j] + v * framed[i, j + 1]
    lower = (1 - v) * framed[i + 1, j] + v * framed[i + 1, j + 1]
    return (1 - u) * upper + u * lower
