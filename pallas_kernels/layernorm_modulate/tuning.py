"""How kernels are cut for a width, and where they are faster than XLA: measured, then a rule.

The numbers come from `benchmarks/tune_layernorm_modulate.py` and from the sweep of `alload bench
kernel` (benchmarks/results/layernorm_modulate_h200.json), on an NVIDIA H200.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pallas_kernels.layernorm_modulate.operands import Layout

Pass = Literal["forward", "backward", "residual_forward", "residual_backward"]


@dataclass(frozen=True)
class Blocks:
    """How a kernel works through its rows.

    Attributes:
      max_tile: widest tile of a row, a power of two.
      num_warps: warps of a program, which work on one row together.
      programs: pieces that all rows are cut into, about.
      prefetch: whether the next row is loaded before work on this one begins.
      hold: whether scale, shift and gate stay in registers, rather than come from cache each row.
    """

    max_tile: int
    num_warps: int
    programs: int
    prefetch: bool = True
    hold: bool = True


_CORES = 132
"""Streaming multiprocessors of the H200."""


def _blocks(max_tile: int, num_warps: int, per_core: int, **flags: bool) -> Blocks:
    return Blocks(max_tile, num_warps, per_core * _CORES, **flags)


_MEASURED: dict[Pass, dict[int, Blocks]] = {
    "forward": {
        256: _blocks(128, 1, 24),
        512: _blocks(128, 1, 24),
        1024: _blocks(128, 1, 16),
        1152: _blocks(128, 1, 32, prefetch=False),
        1536: _blocks(512, 4, 24),
        2048: _blocks(256, 1, 24),
        3072: _blocks(1024, 8, 4),
        4096: _blocks(1024, 8, 4),
        5120: _blocks(512, 4, 24),
        8192: _blocks(1024, 8, 4),
    },
    "backward": {
        256: _blocks(256, 1, 16),
        512: _blocks(256, 1, 16),
        1024: _blocks(128, 1, 8),
        1152: _blocks(256, 1, 8),
        1536: _blocks(512, 4, 4),
        2048: _blocks(512, 4, 4),
        3072: _blocks(1024, 8, 2),
        4096: _blocks(512, 4, 2),
        5120: _blocks(1024, 8, 2, prefetch=False, hold=False),
        8192: _blocks(1024, 8, 1),
    },
    "residual_forward": {
        256: _blocks(128, 1, 24),
        512: _blocks(128, 1, 16),
        1024: _blocks(128, 1, 24),
        1152: _blocks(128, 1, 32),
        1536: _blocks(256, 1, 32, prefetch=False),
        2048: _blocks(1024, 8, 8),
        3072: _blocks(1024, 8, 8),
        4096: _blocks(1024, 8, 2),
        5120: _blocks(2048, 8, 2),
        8192: _blocks(1024, 8, 4),
    },
    "residual_backward": {
        256: _blocks(256, 1, 16),
        512: _blocks(128, 1, 8),
        1024: _blocks(1024, 4, 4),
        1152: _blocks(512, 4, 3),
        1536: _blocks(1024, 8, 2),
        2048: _blocks(2048, 8, 2),
        3072: _blocks(1024, 8, 1),
        4096: _blocks(2048, 8, 1),
        5120: _blocks(1024, 8, 2),
        8192: _blocks(1024, 8, 1, prefetch=False, hold=False),
    },
}
_WIDER = _blocks(2048, 16, 1, prefetch=False, hold=False)

_LEAST_ELEMENTS: dict[str, int] = {"NVIDIA H200": 256 * 1536}
"""By device kind, the least x that was measured (layernorm_modulate_small_h200.json): from there
on the kernels, forward and backward, were faster than XLA's fusion at every width of the table
above, with one row of scale and shift for each row of the batch. At a width of 128 the forward
alone was not; other layouts were not measured."""


def blocks_for(kernel: Pass, dim: int) -> Blocks:
    """The measured way to cut rows of the nearest width (by ratio); a rule beyond the widest."""
    measured = _MEASURED[kernel]
    if dim > max(measured):
        return _WIDER
    return measured[min(measured, key=lambda width: abs(math.log(width / dim)))]


def kernel_is_faster(device_kind: str, layout: Layout, elements: int, dim: int) -> bool:
    """Whether the kernels were measured as faster for x's size and width; False if unknown."""
    widths = _MEASURED["forward"]
    measured = layout == "row" and min(widths) <= dim <= max(widths)
    return measured and elements >= _LEAST_ELEMENTS.get(device_kind, math.inf)
