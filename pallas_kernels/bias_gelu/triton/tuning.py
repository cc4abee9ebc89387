"""How the kernels divide their work, and where they are faster than XLA.

Rules after a sweep on an NVIDIA H200; what they reach is in
benchmarks/results/bias_gelu_h200.json.
"""

from dataclasses import dataclass

from pallas_kernels import devices


@dataclass(frozen=True)
class Blocks:
    """How a kernel works through its elements.

    Attributes:
      columns: of a program, a power of two.
      tokens: that a program works on at once, a power of two.
      num_warps: warps of a program.
      per_core: programs for each multiprocessor, at most; 0 for one for each block of elements.
    """

    columns: int
    tokens: int
    num_warps: int
    per_core: int = 0


FORWARD = Blocks(512, 2, 2)
BACKWARD = Blocks(256, 4, 4, 8)

_LEAST_ELEMENTS = 1 << 22
_NARROWEST, _ITEMSIZE = 1024, 2
_CHIP = ("NVIDIA H200", "NVIDIA H100")
"""Beginnings of the kinds of devices with the measured chip."""


def measured_as_faster(device_kind: str, elements: int, dim: int, itemsize: int) -> bool | None:
    """Whether the kernels were measured as faster on a device; None if unknown.

    Args:
      device_kind: of the device to run on.
      elements, dim: of x on one device.
      itemsize: bytes of an element of x.
    """
    if elements < _LEAST_ELEMENTS:
        return False
    measured = device_kind.startswith(_CHIP) and dim >= _NARROWEST and itemsize == _ITEMSIZE
    return True if measured else None


def programs(blocks: Blocks, tokens: int, dim: int) -> tuple[int, int]:
    """Programs of a kernel: along the tokens, and along the width."""
    along, across = -(-tokens // blocks.tokens), -(-dim // blocks.columns)
    if blocks.per_core:
        along = min(along, max(1, blocks.per_core * devices.core_count() // across))
    return along, across
