"""The tables that `alload plan` prints."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import rich.box
from rich.table import Table
from rich.text import Text

from alload_jax.data.weights import SourceShare
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
    bounds = " · ".join(
        f"{name} {_bound(identity[name])}"
        for name in ("m_mem", "m_comp", "p", "rows")
        if identity.get(name)
    )
    title = f"{case.name} · {case.ranks} ranks · {bounds}"
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


def _bound(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{bucket}: {rows}" for bucket, rows in value.items())
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"
