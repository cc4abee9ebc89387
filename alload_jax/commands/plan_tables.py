"""The tables that `alload plan` prints."""

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import rich.box
from rich.table import Table
from rich.text import Text

from alload_jax.commands.plan_inputs import PlanRequest
from alload_jax.data.selection import SourceShare
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.planning.analytic import SHORTEST, USABLE_SHARE, step_memory
from alload_jax.planning.devices import device_named
from alload_jax.planning.remat import OFFLOADED, RematPolicy, host_bytes
from alload_jax.planning.samples import Geometry
from alload_jax.planning.study import Case

_SECONDS = ("first_step_seconds",)
_COUNTS = ("cost", "seconds", "tokens_per_second", "samples_per_second")
_WEIGHTS = ("longest_weight", "longest_weight_by_step")
_PLAIN = ("order_correlation", "step_samples_min", "step_samples_max", *_WEIGHTS)
LABELS = {
    "buckets": "programs",
    "first_step_seconds": "time to the first step",
    "step_samples_min": "least samples of a step / mean",
    "step_samples_max": "most samples of a step / mean",
    "longest_weight": "weight of longest / shortest samples",
    "longest_weight_by_step": "the same, each step a mean of its own",
    "repeated_neighbours": "repeated neighbours",
    "repeated_neighbours_random": "repeated neighbours, at random",
}
_COLUMNS = {
    "steps": "steps",
    "imbalance": "imbalance",
    "idle": "idle",
    "padding": "padding",
    "buckets": "programs",
    "first_step_seconds": "first step",
    "samples of a step": "samples of a step / mean",
    "weight": "long / short weight (by step)",
    "tokens_per_second": "tokens/s",
}
_REPLAY = {"idle": "idle, replayed", "tokens_per_second": "tokens/s, replayed"}


def case_table(case: Case) -> Table:
    """A table of all metrics of one case."""
    identity = case.plan.identity() | {"m_mem": case.plan_m_mem}
    bounds = []
    for name in ("m_mem", "m_comp", "p", "rows"):
        if isinstance(value := identity.get(name), dict):
            bounds.append(f"{name} {', '.join(f'{key}: {rows}' for key, rows in value.items())}")
        elif value:
            bounds.append(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:,.5g}")
    title = f"{case.name} · {case.ranks} ranks · {' · '.join(bounds)}"
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in case.figures()["metrics"].items():
        label = LABELS.get(name, name.replace("_", " "))
        if name == "cost":
            label = "time of the epoch, s" if case.in_seconds else "cost of the epoch, no unit"
        elif name == "tokens_per_second":
            label = "tokens/s" if case.in_seconds else "tokens per unit of cost"
        table.add_row(label, readable(name, value))
    for name, value in asdict(case.simulation).items() if case.simulation else ():
        table.add_row(f"replayed: {name.replace('_', ' ')}", readable(name, value))
    return table


def comparison_table(cases: Sequence[Case]) -> Table:
    """A table of the main metrics with a row for each case."""
    table = Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("ranks", justify="right")
    table.add_column("policy", no_wrap=True)
    replay = _REPLAY if cases[0].simulation else {}
    columns = dict(_COLUMNS)
    if not cases[0].in_seconds:
        columns["tokens_per_second"] = "tokens/cost"
    for label in (*columns.values(), *replay.values()):
        table.add_column(label, justify="right")
    before = cases[0].ranks
    for case in cases:
        if case.ranks != before:
            table.add_section()
        before = case.ranks
        metrics = case.figures()["metrics"]
        cells = {name: readable(name, metrics[name]) for name in columns if name in metrics}
        least, most = (metrics[f"step_samples_{end}"] for end in ("min", "max"))
        cells["samples of a step"] = f"{least:.2f}–{most:.2f}"
        by_plan, by_step = (metrics[name] for name in _WEIGHTS)
        cells["weight"] = f"{by_plan:.2f} ({by_step:.2f})"
        replayed = asdict(case.simulation) if case.simulation else {}
        table.add_row(
            str(case.ranks),
            case.name,
            *(cells[name] for name in columns),
            *(readable(name, replayed[name]) for name in replay),
        )
    return table


def shares_table(shares: Sequence[SourceShare]) -> Table:
    """A table of what the entries of `data.weights` are of an epoch."""
    table = Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("source", no_wrap=True)
    for name in ("weight", "samples", "samples an epoch", "share of tokens"):
        table.add_column(name, justify="right")
    for each in shares:
        table.add_row(
            Text(each.path),
            f"{each.weight:g}",
            f"{each.samples:,}",
            f"{each.epoch_samples:,.10g}",
            f"{each.share:.1%}",
        )
    return table


def readable(name: str, value: float | None) -> str:
    """A metric's value as text."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if name in _SECONDS:
        return f"{value:,.0f} s"
    if name in _COUNTS:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    shown = f"{value:.3f}" if name in _PLAIN else f"{value:.2%}"
    return shown.lstrip("-") if float(shown.rstrip("%")) == 0 else shown


_DEVICES = ("h100", "h200")
_REMAT: tuple[RematPolicy, ...] = (
    *("offload", "offload_attention", "offload_feed_forward_and_attention", "full"),
    *("attention", "feed_forward_and_attention"),
    *("matmuls_and_attention", "norms_matmuls_and_attention"),
)
_SIZES = ((480, 832), (720, 1280))
_LONGEST = 1001
"""Most frames of a clip that are tried."""


def memory_cases(options: argparse.Namespace) -> tuple[str, list[Json]]:
    """Predicts memory for the model of the flags.

    Returns:
      Its name; and for each device and `remat`: whether that is `configured`; bytes of the `state`,
      which do not depend on the batch, and bytes `per_token`; `m_mem`, the most tokens of a
      micro-batch, 0 if not even one fits; bytes that as many take of the `host`, at most; frames
      of the longest of `clips` by "HEIGHTxWIDTH", 0 for none.

    Raises:
      InputError: the model has no cost model, or a flag is wrong.
    """
    request, condition = PlanRequest(options), 0
    request.fields.pop("cost_model", None)  # it says nothing of other policies' memory
    architecture, model_name = request.architecture
    stride = Geometry().vae_stride
    if (model := request.model) is not None:
        from alload_jax.models.families import family_of

        stride = family_of(model).sampling_defaults(model).vae_stride
        if model.joint_attention:
            condition = sum(part.length for part in model.condition_parts())
    geometry = Geometry(options.vae_stride or stride, request.patch_size)
    if options.memory_gb is not None and not 0 < options.memory_gb < math.inf:
        raise InputError(f"alload plan: --memory-gb is {options.memory_gb}; it must be above 0")
    names = [options.device] if options.device else list(_DEVICES)
    if options.memory_gb is not None:
        names = names[:1]  # the device matters by its memory alone
    replicas = max(1, min(options.ranks or [1]) // options.shards)
    cases = []
    for name, remat in itertools.product(names, _REMAT):
        device = device_named(name)
        memory = step_memory(architecture, device, remat, options.shards, request.trained, replicas)
        budget, shown = USABLE_SHARE * device.memory, device.name
        if options.memory_gb is not None:
            budget, shown = options.memory_gb * 1e9, f"{options.memory_gb:g} GB"
        free = budget * (1 - options.margin)
        frames = np.arange(1, _LONGEST + 1, geometry.vae_stride[0])
        clips = {}
        for height, width in _SIZES:
            sides = (np.full_like(frames, side) for side in (height, width))
            seq_len = geometry.seq_len(frames, *sides) + condition
            fits = [memory.bytes_of(float(tokens), 1) <= free for tokens in seq_len]
            clips[f"{height}x{width}"] = int(max(frames[fits], default=0))
        try:
            most = memory.max_tokens(budget, options.margin, SHORTEST)
        except InputError:
            most = 0
        case: Json = {"device": shown, "remat": remat}
        case["configured"] = model is not None and remat == request.remat
        case |= {"state": memory.base, "per_token": memory.per_token, "m_mem": most, "host": 0.0}
        if remat in OFFLOADED:
            case["host"] = host_bytes(architecture, device, most, remat)
        cases.append(case | {"clips": clips})
    return model_name, cases


def memory_table(cases: list[Json]) -> Table:
    """The cases as a table."""
    table = Table(box=rich.box.SIMPLE)
    table.add_column("device")
    table.add_column("model.remat", overflow="fold")
    for name in ("state GB", "KB per token", "M_mem tokens", "host's GB"):
        table.add_column(name, justify="right")
    for height, width in _SIZES:
        table.add_column(f"longest clip {height}×{width}", justify="right")
    for case in cases:
        clips = (
            f"{'≥ ' if frames == _LONGEST else ''}{frames:,} frames" if frames else "–"
            for frames in case["clips"].values()
        )
        table.add_row(
            case["device"],
            f"{case['remat']} (of the config)" if case["configured"] else case["remat"],
            f"{case['state'] / 1e9:.1f}",
            f"{case['per_token'] / 1e3:.0f}",
            f"{case['m_mem']:,}" if case["m_mem"] else "does not fit",
            f"{case['host'] / 1e9:.0f}" if case["host"] else "–",
            *clips,
        )
    return table
