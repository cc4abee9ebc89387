"""How preparation stores what encoders give."""

import numpy as np


def as_float16(values: np.ndarray) -> np.ndarray:
    """Rounds to float16, without a warning about what is too large for it."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16)
