"""Digit accuracy: a small classifier reads generated stills."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from alload_jax.data.datasets.digits import DIGIT, load_digits
from alload_jax.data.manifest import Manifest
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.geometry import divisible
from alload_jax.sampling.evaluators.evaluator import Drawing

_CLASSES = 10


@dataclass(frozen=True)
class DigitAccuracy:
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
        if self.per_digit < 1:
            raise InputError(
                f"evaluators: digit_accuracy: per_digit is {self.per_digit}; it must be at least 1"
            )

    def check(self, model: ModelConfig, manifest: Manifest) -> None:
        """See `Evaluator.check`; the evaluator needs 8×8 stills of ten classes.

        Raises:
          InputError: the model cannot generate such stills.
        """
        require_digits(self.name, (1, DIGIT, DIGIT), model, manifest)

    def evaluate(self, drawing: Drawing) -> dict[str, float]:
        """See `Evaluator.evaluate`."""
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
      InputError: the data are others, or classes or patches do not fit.
    """
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
