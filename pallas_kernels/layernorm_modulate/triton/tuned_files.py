"""Files of what was measured on the user's own devices: a JSON file for each kind of device.

They are in `$XDG_CACHE_HOME/pallas_kernels/layernorm_modulate`, by default under `~/.cache`.
Processes of one run should have the same files: another division adds up in another order.
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pallas_kernels.layernorm_modulate.triton.division import Division, Pass, Range

_FORMAT = "layernorm-modulate-tuning-1"


class Tuned(NamedTuple):
    """What was measured on a device.

    Attributes:
      divisions: of each kernel, by width.
      faster: where kernels were faster than XLA's fusion with a scale for each row of a batch;
        None for nowhere.
    """

    divisions: Mapping[Pass, Mapping[int, Division]]
    faster: Range | None


def path_of(device_kind: str) -> Path:
    """The file of a kind of device."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"\W+", "_", device_kind).strip("_").lower()
    return cache / "pallas_kernels" / "layernorm_modulate" / f"{name}.json"


@functools.cache
def read(device_kind: str) -> Tuned | None:
    """What the device's file says; None without one. It is read once in a process.

    Raises:
      ValueError: the file is not what `write` writes.
    """
    path = path_of(device_kind)
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _parsed(json.loads(text), device_kind)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a result of `alload bench tune` for {device_kind} ({error}); delete it, "
            "or measure again"
        ) from error


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
        "faster": tuned.faster and tuned.faster._asdict(),
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
        divisions[kernel] = {int(dim): _division(fields) for dim, fields in by_dim.items()}
    faster = content["faster"]
    if faster is not None:
        narrowest, widest = faster["widths"]
        faster = Range(int(faster["least_elements"]), (int(narrowest), int(widest)))
    return Tuned(divisions, faster)


def _division(fields: Mapping[str, Any]) -> Division:
    division = Division(**fields)
    counts = (division.max_tile, division.num_warps, division.per_core)
    powers = all(type(count) is int and count > 0 for count in counts) and all(
        count & (count - 1) == 0 for count in counts[:2]
    )
    flags = all(type(flag) is bool for flag in (division.prefetch, division.keep_in_registers))
    if not powers or not flags:
        raise ValueError(f"{division} cannot run")
    return division
