"""Files of what was measured on devices: a JSON file for each kind of device.

That of an NVIDIA H200 is part of the package. Those of the user's own devices are in
`$XDG_CACHE_HOME/pallas_kernels/layernorm_modulate`, by default under `~/.cache`.
Processes of one run should have the same files: another division adds up in another order.
"""

import dataclasses
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pallas_kernels.layernorm_modulate.triton.division import Division, Pass

_FORMAT = "layernorm-modulate-tuning-1"
_DAMAGE = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),
)
"""What reading a file of another content may raise."""


class Tuned(NamedTuple):
    """What was measured on a device.

    Attributes:
      divisions: of each kernel, by width.
      times_xla: by width, how many times as fast as XLA's fusion the kernels were, forward and
        backward, with a scale for each row of a batch.
    """

    divisions: Mapping[Pass, Mapping[int, Division]]
    times_xla: Mapping[int, tuple[float, float]]


def shipped() -> Mapping[Pass, Mapping[int, Division]]:
    """How rows are divided where the user's device was not measured: as on an NVIDIA H200."""
    content = json.loads(Path(__file__).with_name("measured_h200.json").read_text())
    return _parsed(content, content["device"]).divisions


def path_of(device_kind: str) -> Path:
    """The file of a kind of device."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"\W+", "_", device_kind).strip("_").lower()
    return cache / "pallas_kernels" / "layernorm_modulate" / f"{name}.json"


@functools.cache
def read(device_kind: str) -> Tuned | None:
    """What the device's file says; None without one. It is read once in a process.

    A file that is not what `write` writes is passed over with a warning.
    """
    path = path_of(device_kind)
    try:
        return _parsed(json.loads(path.read_text()), device_kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _DAMAGE as error:
        warnings.warn(
            f"{path} is passed over: not a result of `alload bench tune` for {device_kind} "
            f"({type(error).__name__}: {error}); delete it, or measure again",
            stacklevel=2,
        )
        return None


def write(device_kind: str, tuned: Tuned, details: Mapping[str, Any]) -> Path:
    """Writes the device's file, which later processes read, and returns its path."""
    path = path_of(device_kind)
    path.parent.mkdir(parents=True, exist_ok=True)
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
    # Renamed, so that no process reads half a file.
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(path)
    read.cache_clear()
    return path


def _parsed(content: Mapping[str, Any], device_kind: str) -> Tuned:
    if (content["format"], content["device"]) != (_FORMAT, device_kind):
        raise ValueError(f"it is of {content['format']!r}, {content['device']!r}")
    divisions: dict[Pass, dict[int, Division]] = {}
    for kernel in get_args(Pass):
        by_dim = content["divisions"].get(kernel, {})
        divisions[kernel] = {_width(dim): _division(fields) for dim, fields in by_dim.items()}
    times_xla = {_width(dim): _ratios(*found) for dim, found in content["times_xla"].items()}
    return Tuned(divisions, times_xla)


def _width(text: str) -> int:
    if (width := int(text)) < 1:
        raise ValueError(f"a width is {width}")
    return width


def _ratios(forward: Any, backward: Any) -> tuple[float, float]:
    if not all(type(each) is float and 0 < each < math.inf for each in (forward, backward)):
        raise ValueError(f"ratios are {forward!r} and {backward!r}")
    return forward, backward


def _division(fields: Mapping[str, Any]) -> Division:
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
