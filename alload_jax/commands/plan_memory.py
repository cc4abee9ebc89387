"""The table of `alload plan --memory`: what a step needs and the longest clip that fits."""

import argparse
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import rich.box
from rich.table import Table

from alload_jax.commands.plan_inputs import architecture_of
from alload_jax.errors import InputError
from alload_jax.planning.analytic import SHORTEST, USABLE_SHARE, step_memory
from alload_jax.planning.cost import MemoryModel
from alload_jax.planning.devices import device_named
from alload_jax.planning.geometry import Geometry
from alload_jax.planning.remat import OFFLOADED, RematPolicy, host_bytes

_DEVICES = ("h100", "h200")
_REMAT: tuple[RematPolicy, ...] = (
    *("offload", "offload_attention", "offload_feed_forward_and_attention", "full"),
    *("attention", "feed_forward_and_attention"),
    *("matmuls_and_attention", "norms_matmuls_and_attention"),
)
_SIZES = ((480, 832), (720, 1280))
_LONGEST = 1001
"""Most frames of a clip that are tried."""


class Case(NamedTuple):
    """The predicted memory of a model on a device, with one rematerialisation policy.

    Attributes:
      device: name of the device.
      remat: as `model.remat`.
      configured: whether that is the config's.
      state: bytes that do not depend on the batch.
      per_token: bytes per token.
      m_mem: most tokens of a micro-batch; 0 if not even one fits.
      host: bytes of the host's memory that as many take, at most.
      clips: frames of the longest clip by (height, width); 0 for none.
    """

    device: str
    remat: str
    configured: bool
    state: float
    per_token: float
    m_mem: int
    host: float
    clips: dict[tuple[int, int], int]

    def content(self) -> dict[str, Any]:
        """The case as JSON values."""
        clips = {f"{height}x{width}": frames for (height, width), frames in self.clips.items()}
        return self._asdict() | {"clips": clips}


def memory_cases(options: argparse.Namespace) -> tuple[str, list[Case]]:
    """Predicts memory for the model of the flags; returns its name and the cases.

    Raises:
      InputError: the model has no cost model, or a flag is wrong.
    """
    model = architecture_of(options)
    stride = options.vae_stride or model.vae_stride
    geometry = Geometry(stride, options.patch_size or model.patch_size)
    if options.memory_gb is not None and not 0 < options.memory_gb < math.inf:
        raise InputError(f"alload plan: --memory-gb is {options.memory_gb}; it must be above 0")
    names = [options.device] if options.device else list(_DEVICES)
    if options.memory_gb is not None:
        names = names[:1]  # the device matters by its memory alone
    cases = []
    for name, remat in itertools.product(names, _REMAT):
        device = device_named(name)
        memory = step_memory(model.architecture, device, remat, options.shards, model.trained)
        budget, shown = USABLE_SHARE * device.memory, device.name
        if options.memory_gb is not None:
            budget, shown = options.memory_gb * 1e9, f"{options.memory_gb:g} GB"
        free = budget * (1 - options.margin)
        clips = {size: _longest(memory, free, geometry, size, model.condition) for size in _SIZES}
        most = _most_tokens(memory, budget, options.margin)
        host = 0.0
        if remat in OFFLOADED:
            host = host_bytes(model.architecture, device, most, remat)
        own, predicted = remat == model.remat, (memory.base, memory.per_token)
        cases.append(Case(shown, remat, own, *predicted, most, host, clips))
    return model.name, cases


def memory_table(cases: list[Case]) -> Table:
    """The cases as a table."""
    table = Table(box=rich.box.SIMPLE)
    table.add_column("device")
    table.add_column("model.remat", overflow="fold")
    for name in ("state GB", "KB per token", "M_mem tokens", "host's GB"):
        table.add_column(name, justify="right")
    for height, width in _SIZES:
        table.add_column(f"longest clip {height}×{width}", justify="right")
    for case in cases:
        clips = [_shown(frames) for frames in case.clips.values()]
        table.add_row(
            case.device,
            f"{case.remat} (of the config)" if case.configured else case.remat,
            f"{case.state / 1e9:.1f}",
            f"{case.per_token / 1e3:.0f}",
            f"{case.m_mem:,}" if case.m_mem else "does not fit",
            f"{case.host / 1e9:.0f}" if case.host else "–",
            *clips,
        )
    return table


def _shown(frames: int) -> str:
    least = "≥ " if frames == _LONGEST else ""
    return f"{least}{frames:,} frames" if frames else "–"


def _most_tokens(memory: MemoryModel, budget: float, margin: float) -> int:
    try:
        return memory.max_tokens(budget, margin, SHORTEST)
    except InputError:
        return 0


def _longest(
    memory: MemoryModel, free: float, geometry: Geometry, size: tuple[int, int], condition: int
) -> int:
    """Frames of the longest clip of a size that fits with its condition's tokens; 0 for none."""
    frames = np.arange(1, _LONGEST + 1, geometry.vae_stride[0])
    height, width = (np.full_like(frames, side) for side in size)
    seq_len = geometry.seq_len(frames, height, width) + condition
    fits = [memory.bytes_of(float(tokens), 1) <= free for tokens in seq_len]
    return int(max(frames[fits], default=0))
