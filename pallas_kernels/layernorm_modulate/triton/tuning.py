"""How kernels divide rows of a width, and where they are faster than XLA: measured, then a rule.

How rows are divided comes from `alload bench tune` on an NVIDIA H200
(benchmarks/results/kernel_tuning_*h200.json) and stands in `measured_h200.json`; what the kernels
are faster at comes from the sweep of `alload bench kernel`
(benchmarks/results/layernorm_modulate_h200.json). What `alload bench tune` measures on another
device stands in a file of the user's, see `tuned_files.py`, and goes before them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from pallas_kernels import devices
from pallas_kernels.layernorm_modulate.operands import ModulationLayout
from pallas_kernels.layernorm_modulate.triton import tuned_files
from pallas_kernels.layernorm_modulate.triton.division import Blocks, Division, Pass, Range

MEASURED = tuned_files.shipped()
"""Of nearly all multiples of 128 from 1,024 to 8,192, and of two narrower widths."""
_WIDER = Division(2048, 16, 1, prefetch=False, keep_in_registers=False)
_MOST_PADDED = 1.25
"""Width with the padding of equal tiles over width of a row, at most."""
_NARROWEST = 128
"""Elements of a tile."""


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

    Tiles of several sizes take a sum over the program's threads each. Equal ones are halved while
    they would pad a row much.
    """
    found = nearest(measured, dim)
    if dim in measured:
        return found
    tile = found.max_tile
    while tile > _NARROWEST and not pads_little(dim, tile):
        tile //= 2
    return replace(found, max_tile=tile, equal_tiles=True)


def pads_little(dim: int, tile: int) -> bool:
    """Whether equal tiles of this width are hardly wider together than a row of `dim` elements."""
    return -(-dim // tile) * tile <= _MOST_PADDED * dim


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
