"""A short digest of the content of arrays."""

import hashlib

import numpy as np


def digest(*columns: np.ndarray) -> str:
    """The same 16 hexadecimal digits for the same bytes."""
    found = hashlib.sha256()
    for column in columns:
        found.update(np.ascontiguousarray(column).tobytes())
    return found.hexdigest()[:16]
