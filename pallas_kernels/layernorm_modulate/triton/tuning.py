"""How kernels divide rows of a width, and where they are faster than XLA: measured, then a rule.

The numbers come from `alload bench tune` (benchmarks/results/kernel_tuning_h200.json) and from the
sweep of `alload bench kernel` (benchmarks/results/layernorm_modulate_h200.json), on an NVIDIA H200.
What `alload bench tune` measures on another device stands in a file of the user's, see
`tuned_files.py`, and goes before them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from pallas_kernels import devices
from pallas_kernels.layernorm_modulate.operands import ModulationLayout
from pallas_kernels.layernorm_modulate.triton import tuned_files
from pallas_kernels.layernorm_modulate.triton.division import Blocks, Division, Pass, Range

MEASURED: dict[Pass, dict[int, Division]] = {
    "forward": {
        256: Division(128, 1, 24),
        512: Division(128, 1, 24),
        1024: Division(128, 1, 16),
        1152: Division(128, 1, 32, prefetch=False),
        1280: Division(128, 1, 24),
        1408: Division(256, 1, 24),
        1536: Division(512, 4, 24),
        1792: Division(512, 4, 8),
        2048: Division(256, 1, 24),
        2304: Division(128, 1, 24),
        2560: Division(512, 4, 24),
        2816: Division(512, 4, 24),
        3072: Division(1024, 8, 4),
        3328: Division(1024, 8, 4),
        3584: Division(512, 4, 8),
        3840: Division(512, 4, 8),
        4096: Division(1024, 8, 4),
        4608: Division(512, 4, 8),
        5120: Division(512, 4, 24),
        5632: Division(1024, 8, 4),
        6144: Division(1024, 8, 4),
        7168: Division(1024, 8, 4),
        8192: Division(1024, 8, 4),
    },
    "backward": {
        256: Division(256, 1, 16),
        512: Division(256, 1, 16),
        1024: Division(128, 1, 8),
        1152: Division(256, 1, 8),
        1280: Division(256, 1, 8),
        1408: Division(128, 1, 8),
        1536: Division(512, 4, 4),
        1792: Division(512, 4, 4),
        2048: Division(512, 4, 4),
        2304: Division(512, 4, 4, prefetch=False, keep_in_registers=False),
        2560: Division(512, 4, 4, prefetch=False, keep_in_registers=False),
        2816: Division(512, 4, 2),
        3072: Division(1024, 8, 2),
        3328: Division(1024, 8, 2),
        3584: Division(1024, 8, 2),
        3840: Division(1024, 4, 2, prefetch=False, keep_in_registers=False),
        4096: Division(512, 4, 2),
        4608: Division(512, 4, 2),
        5120: Division(1024, 8, 2, prefetch=False, keep_in_registers=False),
        5632: Division(1024, 8, 1),
        6144: Division(1024, 8, 1),
        7168: Division(1024, 8, 1),
        8192: Division(1024, 8, 1),
    },
    "residual_forward": {
        256: Division(128, 1, 24),
        512: Division(128, 1, 16),
        1024: Division(128, 1, 24),
        1152: Division(128, 1, 32),
        1280: Division(256, 1, 24),
        1408: Division(128, 1, 24),
        1536: Division(256, 1, 32, prefetch=False),
        1792: Division(512, 4, 24),
        2048: Division(1024, 8, 8),
        2304: Division(512, 4, 8),
        2560: Division(512, 4, 8),
        2816: Division(512, 4, 24),
        3072: Division(1024, 8, 8),
        3328: Division(1024, 8, 4),
        3584: Division(1024, 8, 4),
        3840: Division(1024, 8, 4),
        4096: Division(1024, 8, 2),
        4608: Division(1024, 8, 4),
        5120: Division(2048, 8, 2),
        5632: Division(512, 4, 8),
        6144: Division(1024, 8, 4),
        7168: Division(1024, 8, 4),
        8192: Division(1024, 8, 4),
    },
    "residual_backward": {
        256: Division(256, 1, 16),
        512: Division(128, 1, 8),
        1024: Division(1024, 4, 4),
        1152: Division(512, 4, 3),
        1280: Division(512, 4, 3),
        1408: Division(512, 4, 2),
        1536: Division(1024, 8, 2),
        1792: Division(512, 4, 2),
        2048: Division(2048, 8, 2),
        2304: Division(512, 4, 2),
        2560: Division(512, 4, 2),
        2816: Division(1024, 8, 1),
        3072: Division(1024, 8, 1),
        3328: Division(512, 4, 2, prefetch=False, keep_in_registers=False),
        3584: Division(1024, 8, 1),
        3840: Division(1024, 8, 1),
        4096: Division(2048, 8, 1),
        4608: Division(1024, 8, 1),
        5120: Division(1024, 8, 2),
        5632: Division(1024, 8, 1, prefetch=False, keep_in_registers=False),
        6144: Division(1024, 8, 1, prefetch=False, keep_in_registers=False),
        7168: Division(1024, 8, 1, prefetch=False, keep_in_registers=False),
        8192: Division(1024, 8, 1, prefetch=False, keep_in_registers=False),
    },
}
_WIDER = Division(2048, 16, 1, prefetch=False, keep_in_registers=False)
_EQUAL = (1024, 8)
"""Width and warps of equal tiles, where they pad a row little."""
_MOST_PADDED = 1.25
"""Width with padding over width of a row, at most."""


_LEAST_ELEMENTS = 256 * 1536
"""Of x, from which on the kernels were faster on an H200."""
_NEAR = math.log(1.15)
"""How far a width may be, by ratio, from one that was measured on the user's device."""

_FASTER: dict[tuple[str, ModulationLayout], Range] = {
    ("NVIDIA H200", "row"): Range(_LEAST_ELEMENTS, (256, 8192)),
    ("NVIDIA H200", "segment"): Range(8 * 4096 * 1152, (1152, 5120)),
    ("NVIDIA H200", "token"): Range(32760 * 1536, (1536, 5120)),
}
"""By device kind and layout of scale, from layernorm_modulate_{,small_,layouts_}h200.json. Not so,
in the forward alone: rows of width 128, and a scale for each token at width 1152."""

_SAME_CHIP = {"NVIDIA H100": "NVIDIA H200"}
"""Beginnings of device kinds, and the measured device that has their chip. An H100's memory is
slower, so that a kernel which reads and writes less gains as much or more."""


def divisions(kernel: Pass, device_kind: str) -> Mapping[int, Division]:
    """How a kernel divides rows of each measured width on a device."""
    tuned = tuned_files.read(device_kind)
    return {**MEASURED[kernel], **(tuned.divisions[kernel] if tuned else {})}


def nearest(measured: Mapping[int, Division], dim: int) -> Division:
    """How rows of the nearest measured width (by ratio) are divided; a rule beyond the widest."""
    if dim > max(measured):
        return _WIDER
    return measured[min(measured, key=lambda width: abs(math.log(width / dim)))]


def division_for(measured: Mapping[int, Division], dim: int) -> Division:
    """How rows are divided: as measured, or like those of the nearest width in equal tiles.

    The equal tiles are `_EQUAL` where these pad a row little and the nearest width has four or
    eight warps. Tiles of several sizes take a sum over the program's threads each, and narrow ones
    load little at once (benchmarks/results/layernorm_equal_tiles_h200.json). Where that leaves one
    program for each multiprocessor, it is two if a measured width of as many such tiles has two:
    one reached half of a copy (benchmarks/results/layernorm_widths_h200.json).
    """
    found = nearest(measured, dim)
    if dim in measured:
        return found
    tile, warps = _EQUAL
    if found.num_warps in (4, 8) and -(-dim // tile) * tile <= _MOST_PADDED * dim:
        per_core = max(1, found.per_core * found.num_warps // warps)
        found = replace(found, max_tile=tile, num_warps=warps, per_core=per_core)
        found = (_in_two_programs(measured, dim) if per_core == 1 else None) or found
    return replace(found, equal_tiles=True)


def _in_two_programs(measured: Mapping[int, Division], dim: int) -> Division | None:
    """The division of the nearest measured width of as many `_EQUAL` tiles, if it has two."""
    tile, _ = _EQUAL
    alike = {
        abs(math.log(width / dim)): found
        for width, found in measured.items()
        if (found.max_tile, found.num_warps) == _EQUAL and -(-width // tile) == -(-dim // tile)
    }
    found = alike[min(alike)] if alike else None
    return found if found and found.per_core > 1 else None


def blocks_for(kernel: Pass, dim: int) -> Blocks:
    """How a kernel divides rows of `dim` elements on the device to run on."""
    measured = divisions(kernel, devices.device_kind())
    return division_for(measured, dim).blocks(devices.core_count())


def measured_as_faster(
    device_kind: str, layout: ModulationLayout, elements: int, dim: int
) -> bool | None:
    """Whether the kernels were measured as faster for x's size and width; None if unknown."""
    if elements < _LEAST_ELEMENTS:
        return False
    if layout == "row" and (ratios := _measured_ratios(device_kind, dim)):
        return min(ratios) > 1
    same_chip = (same for kind, same in _SAME_CHIP.items() if device_kind.startswith(kind))
    faster = _FASTER.get((next(same_chip, device_kind), layout))
    if faster is None or dim > faster.widths[1]:
        return None
    return dim >= faster.widths[0] and elements >= faster.least_elements


def _measured_ratios(device_kind: str, dim: int) -> tuple[float, float] | None:
    """How many times as fast as XLA's the nearest width was on the user's device; None if far."""
    tuned = tuned_files.read(device_kind)
    near = {abs(math.log(width / dim)): width for width in (tuned.times_xla if tuned else ())}
    if tuned is None or not near or min(near) > _NEAR:
        return None
    return tuned.times_xla[near[min(near)]]
