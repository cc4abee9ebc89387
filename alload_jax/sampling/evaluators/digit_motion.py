"""Digit motion: how evenly digits move in generated clips."""

from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from alload_jax.data.datasets.digits import load_digits, render_clip
from alload_jax.data.manifest import Manifest
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.sampling.evaluators.digit_accuracy import require_digits
from alload_jax.sampling.evaluators.evaluator import Drawing


@dataclass(frozen=True)
class DigitMotion:
    """Jerk over travel of generated clips of one digit, and of as many real ones.

    The position of a digit is the centroid of a frame's brightness. Travel is the sum of its steps
    from frame to frame, and jerk is the mean length of its third differences. Digits that tremble
    have a large ratio. `jerk_over_travel` is the mean over clips that the model generates, and
    `jerk_over_travel_real` over clips of the data set.

    Attributes:
      name: `digit_motion`.
      clips: number of clips.
      frames, height, width: size of the clips; height and width in pixels.
    """

    name: Literal["digit_motion"] = "digit_motion"
    clips: int = 30
    frames: int = 17
    height: int = 16
    width: int = 16

    def __post_init__(self) -> None:
        if self.clips < 1:
            raise InputError(
                f"evaluators: digit_motion: clips is {self.clips}; it must be at least 1"
            )
        if self.frames < 4:
            raise InputError(
                f"evaluators: digit_motion: frames is {self.frames}; third differences need 4"
            )

    def check(self, model: ModelConfig, manifest: Manifest) -> None:
        """See `Evaluator.check`.

        Raises:
          InputError: the data are not the digits, or the model cannot generate such clips.
        """
        require_digits(self.name, self._size, model, manifest)

    @property
    def _size(self) -> tuple[int, int, int]:
        return (self.frames, self.height, self.width)

    def evaluate(self, drawing: Drawing) -> dict[str, float]:
        """See `Evaluator.evaluate`."""
        images, digits = load_digits()
        rng = np.random.default_rng(drawing.seed)
        chosen = rng.choice(len(images), self.clips, replace=self.clips > len(images))
        labels = np.full((self.clips, drawing.condition_tokens), digits.max() + 1, np.int32)
        labels[:, 0] = digits[chosen]
        drawn = drawing.draw(drawing.values, jax.random.key(drawing.seed), labels, self._size)
        motion = drawing.origin["digits"].get("motion", "drift")  # see Digits.origin
        real = [render_clip(images[n : n + 1], *self._size, rng, motion) for n in chosen]
        return {
            "jerk_over_travel": _mean_jerk_over_travel(drawn),
            "jerk_over_travel_real": _mean_jerk_over_travel(np.stack(real)),
        }


def _mean_jerk_over_travel(clips: np.ndarray) -> float:
    """clips: [N, frames, height, width, 1] in −1 to 1."""
    return float(np.mean([jerk_over_travel(clip[..., 0]) for clip in clips]))


def jerk_over_travel(clip: np.ndarray) -> float:
    """Mean length of the third differences of the centroid, over the length of its path.

    Args:
      clip: [frames, height, width] in −1 to 1; what lies outside is clipped.
    """
    brightness = np.clip(clip.astype(np.float64), -1, 1) + 1
    total = np.maximum(brightness.sum(axis=(1, 2)), 1e-9)
    rows = brightness.sum(axis=2) @ np.arange(clip.shape[1])
    columns = brightness.sum(axis=1) @ np.arange(clip.shape[2])
    centroid = np.stack([rows, columns], axis=1) / total[:, None]
    travel = np.linalg.norm(np.diff(centroid, axis=0), axis=1).sum()
    jerk = np.linalg.norm(np.diff(centroid, 3, axis=0), axis=1).mean()
    return float(jerk / max(travel, 1e-9))
