"""How a kernel divides its rows into programs and tiles, by table, file and measurement.

The table of an NVIDIA H200 is part of the package. Those of the user's own devices are in
`$XDG_CACHE_HOME/pallas_kernels/layernorm_modulate`, by default under `~/.cache`.
Processes of one run must have the same files, since they must compile the same programs.

How rows are divided comes from `alload bench tune` on an NVIDIA H200
(benchmarks/results/kernel_tuning_*h200.json) and stands in `measured_h200.json`; what the kernels
are faster at comes from the sweep of `alload bench kernel`
(benchmarks/results/layernorm_modulate_h200.json). What `alload bench tune` measures on another
device stands in a file of the user's and goes before them.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from jaxtyping import PyTree

from pallas_kernels import devices, first_use
from pallas_kernels.layernorm_modulate.operands import ModulationLayout
from pallas_kernels.walks import LANES, MOST_BARRIERS, Pace, Way, way_of

Pass = Literal["forward", "backward", "residual_forward", "residual_backward", "sum_backward"]
"""Kernels by what they hold: `residual_backward` after x + gate·y, `sum_backward` after x + y."""


@dataclass(frozen=True)
class Division:
    """How a kernel divides its rows, on a device with any number of multiprocessors.

    Attributes:
      max_tile: widest tile of a row, a power of two.
      num_warps: warps of a program, which work on one row together.
      per_core: row blocks for each multiprocessor that all rows are divided into, about.
      prefetch: whether the next row is loaded before work on this one begins.
      keep_in_registers: of scale, shift and gate; else they are loaded again, from cache, for each
        row.
      equal_tiles: whether all tiles are equally wide and the last one may be padded.
    """

    max_tile: int
    num_warps: int
    per_core: int
    prefetch: bool = True
    keep_in_registers: bool = True
    equal_tiles: bool = False


_FORMAT = "layernorm-modulate-tuning-1"


class Tuned(NamedTuple):
    """What was measured on a device.

    Attributes:
      divisions: of each kernel, by width.
      times_xla: by width, how many times as fast as XLA's fusion the kernels were, forward and
        backward, with a scale for each row of a batch.
    """

    divisions: Mapping[Pass, Mapping[int, Division]]
    times_xla: Mapping[int, tuple[float, float]]


def path_of(device_kind: str) -> Path:
    """The file of a kind of device."""
    return first_use.path_of("layernorm_modulate", device_kind)


@functools.cache
def read(device_kind: str) -> Tuned | None:
    """What the device's file says; None without one. It is read once in a process.

    A file that is not what `write` writes is passed over with a warning.
    """
    otherwise = "not a result of `alload bench tune`"
    return first_use.read_file(path_of(device_kind), _FORMAT, device_kind, _parsed, otherwise)


def write(device_kind: str, tuned: Tuned, details: Mapping[str, object]) -> Path:
    """Writes the device's file, which later processes read, and returns its path."""
    content = {
        "format": _FORMAT,
        "device": device_kind,
        "divisions": {
            kernel: {str(dim): dataclasses.asdict(each) for dim, each in by_dim.items()}
            for kernel, by_dim in tuned.divisions.items()
        },
        "times_xla": {str(dim): list(each) for dim, each in tuned.times_xla.items()},
        "details": dict(details),
    }
    first_use.write_file(path_of(device_kind), content)
    read.cache_clear()
    return path_of(device_kind)


def _parsed(content: Mapping[str, PyTree]) -> Tuned:
    divisions: dict[Pass, dict[int, Division]] = {}
    for kernel in get_args(Pass):
        by_dim = content["divisions"].get(kernel, {})
        divisions[kernel] = {_width(dim): _division(fields) for dim, fields in by_dim.items()}
    times_xla = {_width(dim): _ratios(*pair) for dim, pair in content["times_xla"].items()}
    return Tuned(divisions, times_xla)


def _width(text: str) -> int:
    if (width := int(text)) < 1:
        raise ValueError(f"a width is {width}")
    return width


def _ratios(forward: float, backward: float) -> tuple[float, float]:
    if not all(type(each) is float and 0 < each < math.inf for each in (forward, backward)):
        raise ValueError(f"ratios are {forward!r} and {backward!r}")
    return forward, backward


def _division(fields: Mapping[str, PyTree]) -> Division:
    division = Division(**fields)
    counts = (division.max_tile, division.num_warps, division.per_core)
    powers = all(type(count) is int and count > 0 for count in counts) and all(
        count & (count - 1) == 0 for count in counts[:2]
    )
    switches = [each.name for each in dataclasses.fields(division) if each.type is bool]
    flags = all(type(getattr(division, name)) is bool for name in switches)
    if not powers or not flags:
        raise ValueError(f"{division} cannot run")
    return division


MEASURED = _parsed(json.loads(Path(__file__).with_name("measured_h200.json").read_text())).divisions
"""How rows are divided where the user's device was not measured: as on an NVIDIA H200. Of nearly
all multiples of 128 from 1,024 to 8,192, and of two narrower widths."""
_WIDER = Division(2048, 16, 1, prefetch=False, keep_in_registers=False)
_MOST_PADDED = 1.25
"""Width with the padding of equal tiles over width of a row, at most."""
_NARROWEST = 128
"""Elements of a tile."""


_LEAST_ELEMENTS = 256 * 1536
"""Of x, from which on the kernels were faster on an H200."""
_NEAR = math.log(1.15)
"""How far a width may be, by ratio, from one that was measured on the user's device."""

_FASTER: dict[ModulationLayout, tuple[int, int, int]] = {
    "row": (_LEAST_ELEMENTS, 256, 8192),
    "segment": (8 * 4096 * 1152, 1152, 5120),
    "token": (32760 * 1536, 1536, 5120),
}
"""By layout of scale, the least elements and the widths from which and up to which kernels were
faster than XLA's fusion on an H200, forward and backward, all through, from
layernorm_modulate_{,small_,layouts_}h200.json. Not so, in the forward alone: rows of width 128, and
a scale for each token at width 1152. An H100's memory is slower, so that a kernel which reads and
writes less gains as much or more."""


def divisions(kernel: Pass, device_kind: str) -> Mapping[int, Division]:
    """How a kernel divides rows of each measured width on a device."""
    tuned = read(device_kind)
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
    division = nearest(measured, dim)
    if dim in measured:
        return division
    tile = division.max_tile
    while tile > _NARROWEST and not pads_little(dim, tile):
        tile //= 2
    return replace(division, max_tile=tile, equal_tiles=True)


def pads_little(dim: int, tile: int) -> bool:
    """Whether equal tiles of this width are hardly wider together than a row of `dim` elements."""
    return -(-dim // tile) * tile <= _MOST_PADDED * dim


def blocks_for(kernel: Pass, dim: int) -> Division:
    """How a kernel divides rows of `dim` elements on the device to run on."""
    return division_for(divisions(kernel, devices.device_kind()), dim)


def measured_as_faster(
    device_kind: str, layout: ModulationLayout, elements: int, dim: int
) -> bool | None:
    """Whether the kernels were measured as faster for x's size and width; None if unknown."""
    if elements < _LEAST_ELEMENTS:
        return False
    if layout == "row" and (ratios := _measured_ratios(device_kind, dim)):
        return min(ratios) > 1
    least_elements, narrowest, widest = _FASTER[layout]
    if not device_kind.startswith(devices.HOPPER) or dim > widest:
        return None
    faster = dim >= narrowest and elements >= least_elements
    # Of the other layouts, smaller and narrower arrays were not measured.
    return faster if layout == "row" else faster or None


def _measured_ratios(device_kind: str, dim: int) -> tuple[float, float] | None:
    """How many times as fast as XLA's the nearest width was on the user's device; None if far."""
    tuned = read(device_kind)
    near = {abs(math.log(width / dim)): width for width in (tuned.times_xla if tuned else ())}
    if tuned is None or not near or min(near) > _NEAR:
        return None
    return tuned.times_xla[near[min(near)]]


# ---------------------------------------------------------------- Mosaic GPU

_WIDEST = 10_240
"""Columns of a row that was measured."""
_BACKWARD_FROM = 1024
"""Width from which the backward was faster than Triton's on an H200, at each of seven widths up to
8,192 (benchmarks/results/kernels_h200.json); between and beyond them that is assumed."""
_FORWARD_FROM: dict[Pass, int] = {"forward": 4096, "residual_forward": 3072}
"""Width from which each forward was, but for 2 % at 8,192 columns with a residual."""


def backward_faster_than_triton(layout: ModulationLayout, dim: int) -> bool:
    """Whether the backward was, of rows of `dim` columns that share scale, shift and gate so."""
    return layout != "token" and _BACKWARD_FROM <= dim <= _WIDEST


def forward_faster_than_triton(kernel: Pass, dim: int, itemsize: int) -> bool:
    """Whether this forward was, of rows of `dim` columns of so many bytes each."""
    return itemsize == 2 and dim >= _FORWARD_FROM[kernel]


class Kind(NamedTuple):
    """Of a kernel: its pace, how many arrays it reads row by row; `held`, `twice`: see `way_of`."""

    pace: Pace
    streams: int
    held: int = 0
    twice: int = 0


KINDS: dict[Pass, Kind] = {
    "forward": Kind(Pace(16, 6, 42_000), 1),
    "residual_forward": Kind(Pace(16, 6, 37_000), 2),
    "backward": Kind(Pace(20, 4, 54_000), 2, 3, 2),
    "residual_backward": Kind(Pace(20, 4, 62_000), 4, 5, 2),
    "sum_backward": Kind(Pace(20, 4, 58_000), 3, 3, 2),
}
_MOST_GROUPS = 8
"""Of a program, whose walks are those of a multiprocessor."""


def way_for(kernel: Pass, dim: int, bytes_per_column: int) -> Way | None:
    """The way through rows of `dim` columns; None for rows that the kernel does not take.

    Args:
      kernel: which.
      dim: columns.
      bytes_per_column: of all arrays that are read, together.
    """
    pace, _, *registers = KINDS[kernel]
    if dim % LANES or dim > min(_WIDEST, _MOST_GROUPS * pace.chunks * LANES):
        return None
    way = way_of(dim, bytes_per_column, pace, None, *registers)
    return way and way._replace(slots=min(way.slots, MOST_BARRIERS // (way.groups * way.per_core)))


# ---------------------------------------------------------------- shapes


class Workload(NamedTuple):
    """A shape of x, as a transformer's block meets it.

    Attributes:
      batch: rows.
      seq_len: tokens of each.
      dim: width.
      about: where such a shape comes from.
    """

    batch: int
    seq_len: int
    dim: int
    about: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """[B, S, D]."""
        return (self.batch, self.seq_len, self.dim)


WORKLOADS = {
    "wan-1.3b-480p": Workload(1, 32760, 1536, "Wan 2.1 1.3B, 81 frames of 480×832"),
    "dit-xl": Workload(8, 4096, 1152, "DiT-XL, 8 images of 1024×1024"),
    "mmdit-3072": Workload(4, 8190, 3072, "width 3072, 4 clips of 17 frames of 480×832"),
    "wan-14b-720p": Workload(1, 75600, 5120, "Wan 2.1 14B, 81 frames of 720×1280"),
}
