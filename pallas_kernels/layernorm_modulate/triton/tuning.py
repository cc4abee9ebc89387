"""How kernels divide rows of a width, and where they are faster than XLA: measured, then a rule.

The numbers come from `benchmarks/tune_layernorm_modulate.py` and from the sweep of `alload bench
kernel` (benchmarks/results/layernorm_modulate_h200.json), on an NVIDIA H200.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pallas_kernels.layernorm_modulate.operands import ModulationLayout

Pass = Literal["forward", "backward", "residual_forward", "residual_backward"]


@dataclass(frozen=True)
class Blocks:
    """How a kernel works through its rows.

    Attributes:
      max_tile: widest tile of a row, a power of two.
      num_warps: warps of a program, which work on one row together.
      programs: row blocks that all rows are divided into, about.
      prefetch: whether the next row is loaded before work on this one begins.
      keep_in_registers: of scale, shift and gate; else they are loaded again, from cache, for each
        row.
    """

    max_tile: int
    num_warps: int
    programs: int
    prefetch: bool = True
    keep_in_registers: bool = True


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
        5120: _blocks(1024, 8, 2, prefetch=False, keep_in_registers=False),
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
        8192: _blocks(1024, 8, 1, prefetch=False, keep_in_registers=False),
    },
}
_WIDER = _blocks(2048, 16, 1, prefetch=False, keep_in_registers=False)


class Range(NamedTuple):
    """Where kernels were faster than XLA's fusion, forward and backward, all through.

    Attributes:
      least_elements: of x.
      widths: narrowest and widest.
    """

    least_elements: int
    widths: tuple[int, int]


_FASTER: dict[tuple[str, ModulationLayout], Range] = {
    ("NVIDIA H200", "row"): Range(256 * 1536, (256, 8192)),
    ("NVIDIA H200", "segment"): Range(8 * 4096 * 1152, (1152, 5120)),
    ("NVIDIA H200", "token"): Range(32760 * 1536, (1536, 5120)),
}
"""By device kind and layout of scale, from layernorm_modulate_{,small_,layouts_}h200.json. Not so,
in the forward alone: rows of width 128, and a scale for each token at width 1152."""


def blocks_for(kernel: Pass, dim: int) -> Blocks:
    """The measured way to divide rows of the nearest width (by ratio); a rule beyond the widest."""
    measured = _MEASURED[kernel]
    if dim > max(measured):
        return _WIDER
    return measured[min(measured, key=lambda width: abs(math.log(width / dim)))]


def faster_than_reference(
    device_kind: str, layout: ModulationLayout, elements: int, dim: int
) -> bool:
    """Whether the kernels were measured as faster for x's size and width; False if unknown."""
    if (faster := _FASTER.get((device_kind, layout))) is None:
        return False
    narrowest, widest = faster.widths
    return narrowest <= dim <= widest and elements >= faster.least_elements
