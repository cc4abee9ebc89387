"""Does the model draw the digit it was asked for? A small classifier reads its stills."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from alload_jax.data.datasets.digits import DIGIT, load_digits

Draw = Callable[[Any, jax.Array, np.ndarray, tuple[int, int, int]], np.ndarray]
"""(params, key, labels [B, L], (frames, height, width)) → [B, frames, height, width, C]."""


def digit_accuracy(draw: Draw, params: Any, per_digit: int, length: int, seed: int) -> float:
    """Share of drawn 8×8 stills that a classifier reads as the digit asked for.

    The classifier is a support vector machine trained on all of scikit-learn's real digits; on
    held-out real digits such a one is right 99 times in 100.

    Args:
      draw: of `make_draw`.
      params: weights.
      per_digit: stills of each digit.
      length: condition tokens of a sample.
      seed: of the starting noise.
    """
    from sklearn.svm import SVC  # slow to import

    images, digits = load_digits()
    classifier = SVC(gamma="scale").fit(images.reshape(len(images), -1), digits)
    asked = np.repeat(np.arange(10, dtype=np.int32), per_digit)
    labels = np.full((len(asked), length), 10, np.int32)
    labels[:, 0] = asked
    drawn = draw(params, jax.random.key(seed), labels, (1, DIGIT, DIGIT))
    read = classifier.predict(np.clip(drawn, -1, 1).reshape(len(asked), -1))
    return float((read == asked).mean())
