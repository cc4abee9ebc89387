"""Digit accuracy: a small classifier reads generated stills."""

from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from alload_jax.data.datasets.digits import DIGIT, load_digits
from alload_jax.data.manifest import Manifest
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.sampling.evaluators.evaluator import Drawing

_CLASSES = 10


@dataclass(frozen=True)
class DigitAccuracy:
    """Fraction of generated 8×8 stills that a classifier reads as the requested digit.

    The classifier is a support vector machine trained on all of scikit-learn's real digits; its
    accuracy on held-out real digits is 99 %.

    Attributes:
      name: `digit_accuracy`.
      per_digit: number of stills per digit.
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
        if "digits" not in manifest.origin:
            raise InputError(
                f"evaluators: digit_accuracy needs the data set digits, but {manifest.path} holds "
                "other data; remove the evaluator"
            )
        if model.num_classes != _CLASSES:
            raise InputError(
                f"model.num_classes is {model.num_classes}; digits have 10 classes, so set it to 10"
            )
        frames, height, width = model.patch_size
        if frames != 1 or DIGIT % height or DIGIT % width:
            raise InputError(
                f"model.patch_size is {model.patch_size}; stills of {DIGIT}×{DIGIT} digits need "
                f"one frame, and a height and width that divide {DIGIT}"
            )

    def evaluate(self, drawing: Drawing) -> dict[str, float]:
        """See `Evaluator.evaluate`."""
        from sklearn.svm import SVC  # slow to import

        images, digits = load_digits()
        classifier = SVC(gamma="scale").fit(images.reshape(len(images), -1), digits)
        requested = np.repeat(np.arange(_CLASSES, dtype=np.int32), self.per_digit)
        labels = np.full((len(requested), drawing.condition_tokens), _CLASSES, np.int32)
        labels[:, 0] = requested
        key = jax.random.key(drawing.seed)
        drawn = drawing.draw(drawing.values, key, labels, (1, DIGIT, DIGIT))
        read = classifier.predict(np.clip(drawn, -1, 1).reshape(len(requested), -1))
        return {"digit_accuracy": float((read == requested).mean())}
