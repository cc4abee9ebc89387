"""Evaluators: metrics of generated samples, selected by name; and two that read digits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from alload_jax.data.datasets.digits import DIGIT, load_digits, render_clip, require_scikit_learn
from alload_jax.data.manifest import Manifest
from alload_jax.errors import InputError, require_positive
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.samples import divisible
from alload_jax.registry import Registry
from alload_jax.sampling.config import Draw


class Drawing(NamedTuple):
    """What an evaluator needs to generate samples.

    Attributes:
      draw: function that generates samples.
      values: values of the model.
      condition_tokens: number of condition tokens per sample.
      seed: seed of the initial noise.
      origin: origin of the training data.
    """

    draw: Draw
    values: PyTree
    condition_tokens: int
    seed: int
    origin: Mapping[str, Any]


class Evaluator(Protocol):
    """A frozen dataclass whose fields are its config; `name` is its name in the config."""

    def check(self, model: ModelConfig, manifest: Manifest) -> None:
        """Checks before training that the model can be evaluated.

        Raises:
          InputError: the evaluator does not support the model or the data.
        """
        ...

    def evaluate(self, drawing: Drawing) -> dict[str, float]:
        """Returns metrics by name for the run's summary; all processes call it."""
        ...


EVALUATORS: Registry[type[Evaluator]] = Registry(
    "evaluator",
    {
        "digit_accuracy": "alload_jax.sampling.evaluators:DigitAccuracy",
        "digit_motion": "alload_jax.sampling.evaluators:DigitMotion",
    },
)
"""Classes of evaluators, each an `Evaluator`."""


_CLASSES = 10


@dataclass(frozen=True)
class DigitAccuracy(Evaluator):
    """Fraction of generated stills that a classifier reads as the requested digits.

    `digit_accuracy` is that of 8×8 stills of one digit. `pair_accuracy` is that of 8×16 stills of
    two digits, both of which must be read correctly; it is measured if samples have two classes.

    The classifier is a support vector machine trained on all of scikit-learn's real digits; its
    accuracy on held-out real digits is 99 %.

    Attributes:
      name: `digit_accuracy`.
      per_digit: number of stills per digit. There are as many pairs as stills; each digit is as
        often on the left as on the right.
    """

    name: Literal["digit_accuracy"] = "digit_accuracy"
    per_digit: int = 30

    def __post_init__(self) -> None:
        require_positive(f"evaluators: {self.name}: ", self, "per_digit")

    def check(self, model: ModelConfig, manifest: Manifest) -> None:
        """See `Evaluator.check`; the evaluator needs 8×8 stills of ten classes.

        Raises:
          InputError: the model cannot generate such stills.
        """
        require_digits(self.name, (1, DIGIT, DIGIT), model, manifest)

    @override
    def evaluate(self, drawing: Drawing) -> dict[str, float]:
        from sklearn.svm import SVC  # slow to import

        images, digits = load_digits()
        classifier = SVC(gamma="scale").fit(images.reshape(len(images), -1), digits)
        left = np.repeat(np.arange(_CLASSES, dtype=np.int32), self.per_digit)
        metrics = {"digit_accuracy": _accuracy(drawing, left[:, None], classifier)}
        if drawing.condition_tokens > 1:
            right = np.resize(np.arange(_CLASSES, dtype=np.int32), len(left))
            pairs = np.stack([left, right], axis=1)
            metrics["pair_accuracy"] = _accuracy(drawing, pairs, classifier)
        return metrics


def require_digits(
    evaluator: str, size: tuple[int, int, int], model: ModelConfig, manifest: Manifest
) -> None:
    """Checks that a model generates digits in samples of a size (frames, height, width).

    Raises:
      InputError: the data are others, classes or patches do not fit, or scikit-learn is missing.
    """
    require_scikit_learn()
    if "digits" not in manifest.origin:
        raise InputError(
            f"evaluators: {evaluator} needs the data set digits, but {manifest.path} holds "
            "other data; remove the evaluator"
        )
    if model.num_classes != _CLASSES:
        raise InputError(
            f"model.num_classes is {model.num_classes}; digits have 10 classes, so set it to 10"
        )
    if not divisible(size, manifest.vae_stride, model.patch_size):
        raise InputError(
            f"evaluators: {evaluator} draws {'×'.join(map(str, size))} pixels, which "
            f"model.patch_size {model.patch_size} and latents of {manifest.vae_stride[0]} frames "
            "don't divide; choose another patch size or other clips"
        )


def _accuracy(drawing: Drawing, digits: np.ndarray, classifier: Any) -> float:
    """Fraction of generated stills of which every digit is read correctly.

    Args:
      digits: [N, k], digits beside each other.
    """
    count, beside = digits.shape
    labels = np.full((count, drawing.condition_tokens), _CLASSES, np.int32)
    labels[:, :beside] = digits
    key = jax.random.key(drawing.seed)
    drawn = drawing.draw(drawing.values, key, labels, (1, DIGIT, beside * DIGIT))
    stills = np.clip(drawn, -1, 1).reshape(count, DIGIT, beside, DIGIT).swapaxes(1, 2)
    read = classifier.predict(stills.reshape(count * beside, -1)).reshape(count, beside)
    return float((read == digits).all(axis=1).mean())


@dataclass(frozen=True)
class DigitMotion(Evaluator):
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
        require_positive(f"evaluators: {self.name}: ", self, "clips", "height", "width")
        if self.frames < 4:
            raise InputError(
                f"evaluators: digit_motion: frames is {self.frames}; third differences need 4"
            )

    def check(self, model: ModelConfig, manifest: Manifest) -> None:
        """See `Evaluator.check`.

        Raises:
          InputError: the data are not the digits, or the model cannot generate such clips.
        """
        require_digits(self.name, (self.frames, self.height, self.width), model, manifest)

    @override
    def evaluate(self, drawing: Drawing) -> dict[str, float]:
        images, digits = load_digits()
        size = (self.frames, self.height, self.width)
        rng = np.random.default_rng(abs(drawing.seed))
        chosen = rng.choice(len(images), self.clips, replace=self.clips > len(images))
        labels = np.full((self.clips, drawing.condition_tokens), digits.max() + 1, np.int32)
        labels[:, 0] = digits[chosen]
        drawn = drawing.draw(drawing.values, jax.random.key(drawing.seed), labels, size)
        motion = drawing.origin["digits"].get("motion", "drift")  # see Digits.origin
        real = [render_clip(images[n : n + 1], *size, rng, motion) for n in chosen]
        return {
            name: float(np.mean([jerk_over_travel(clip[..., 0]) for clip in clips]))
            for name, clips in (("jerk_over_travel", drawn), ("jerk_over_travel_real", real))
        }


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
