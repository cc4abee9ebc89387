"""How the kernels divide tokens, and where they are faster than XLA.

Rules after a sweep on an NVIDIA H200; what they reach is in
benchmarks/results/rms_norm_rotary_h200.json.
"""

from dataclasses import dataclass

from pallas_kernels import devices


@dataclass(frozen=True)
class Blocks:
    """How a kernel works through its tokens.

    Attributes:
      max_tile: widest tile of a token's channels, a power of two.
      tokens: that a program works on at once, a power of two.
      num_warps: warps of a program.
      per_core: programs for each multiprocessor, at most; 0 for one for each `tokens` tokens.
    """

    max_tile: int
    tokens: int
    num_warps: int
    per_core: int = 0


_NARROW, _WIDE = 2048, 6144
"""Widths up to which the sums leave registers for four programs a core, and for four warps."""
_SUMS_BIAS = 1536
"""Width up to which the bias's sums leave registers for as many programs (114 at 1,536, by ptxas
for sm_90a). Where each head has statistics of its own they do not."""
_LEAST_ELEMENTS = 256 * 1536
_WIDTHS, _HEADS, _ITEMSIZE = (1024, 8192), (64, 128), 2
_CHIP = ("NVIDIA H200", "NVIDIA H100")
"""Beginnings of the kinds of devices with the measured chip."""


def forward_blocks(dim: int, per_head: bool) -> Blocks:
    """For tokens of `dim` channels in the forward."""
    return Blocks(512, 2, 8) if per_head else Blocks(512, 1, 4 if dim <= _WIDE else 8)


def backward_blocks(dim: int, per_head: bool) -> Blocks:
    """For tokens of `dim` channels in the backward."""
    if per_head:
        return Blocks(512, 2, 8, 2)
    if dim > _WIDE:
        return Blocks(1024, 1, 8, 2)
    return Blocks(512, 1, 4, 4 if dim <= _NARROW else 2)


def sums_bias(dim: int, per_head: bool) -> bool:
    """Whether the backward adds up the bias's gradient itself, and does not leave it to XLA."""
    return dim <= _SUMS_BIAS and not per_head


def measured_as_faster(
    device_kind: str, elements: int, dim: int, head_dim: int, itemsize: int
) -> bool | None:
    """Whether the kernels were measured as faster on a device; None if unknown.

    Args:
      device_kind: of the device to run on.
      elements, dim: of x on one device.
      head_dim: channels of a head.
      itemsize: bytes of an element of x.
    """
    if elements < _LEAST_ELEMENTS:
        return False
    measured = _WIDTHS[0] <= dim <= _WIDTHS[1] and head_dim in _HEADS and itemsize == _ITEMSIZE
    return True if measured and device_kind.startswith(_CHIP) else None


def programs(blocks: Blocks, tokens: int) -> int:
    """Programs of a kernel."""
    most = -(-tokens // blocks.tokens)
    return min(most, blocks.per_core * devices.core_count()) if blocks.per_core else most
