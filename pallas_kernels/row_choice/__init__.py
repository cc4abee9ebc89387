"""Rows taken from one of several arrays, in the memory of the last."""

from pallas_kernels.row_choice.api import choose_rows

__all__ = ["choose_rows"]
