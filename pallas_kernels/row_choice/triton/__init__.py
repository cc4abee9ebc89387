"""The Pallas kernel, lowered through Triton: it writes only rows that are not the last part's."""

from pallas_kernels.row_choice.triton.implementation import TritonImplementation

__all__ = ["TritonImplementation"]
