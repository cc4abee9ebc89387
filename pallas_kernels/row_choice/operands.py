"""Operands of a choice of rows."""

from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """Rows and which of them are chosen.

    Attributes:
      parts: [T, D] arrays of one dtype.
      choice: [T] int32, a part's number for each row; −1 for zeros.
    """

    parts: tuple[jax.Array, ...]
    choice: jax.Array
