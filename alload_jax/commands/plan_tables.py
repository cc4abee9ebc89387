"""The tables that `alload plan` prints."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import rich.box
from rich.table import Table

from alload_jax.planning.study import Case

_COUNTS = ("cost", "seconds", "tokens_per_second", "samples_per_second")
_PLAIN = ("order_correlation",)
_COLUMNS = {
    "steps": "steps",
    "imbalance": "imbalance",
    "idle": "idle",
    "compute_cv": "compute CV",
    "step_cv": "step CV",
    "padding": "padding",
    "utilisation": "of M_mem",
    "buckets": "programs",
    "cost": "time",
}
_REPLAY = {"idle": "idle, replayed", "tokens_per_second": "tokens/s"}


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
    for name, value in asdict(case.metrics).items():
        table.add_row(name.replace("_", " "), readable(name, value))
    for name, value in asdict(case.simulation).items() if case.simulation else ():
        table.add_row(f"replayed: {name.replace('_', ' ')}", readable(name, value))
    return table


def comparison_table(cases: Sequence[Case]) -> Table:
    """A table of the main metrics with a row for each case."""
    table = Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("ranks", justify="right")
    table.add_column("policy", no_wrap=True)
    replay = _REPLAY if cases[0].simulation else {}
    for label in (*_COLUMNS.values(), *replay.values()):
        table.add_column(label, justify="right")
    before = cases[0].ranks
    for case in cases:
        if case.ranks != before:
            table.add_section()
        before = case.ranks
        metrics = asdict(case.metrics)
        replayed = asdict(case.simulation) if case.simulation else {}
        table.add_row(
            str(case.ranks),
            case.name,
            *(readable(name, metrics[name]) for name in _COLUMNS),
            *(readable(name, replayed[name]) for name in replay),
        )
    return table


def readable(name: str, value: float | None) -> str:
    """A metric's value as text."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if name in _COUNTS:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    shown = f"{value:.3f}" if name in _PLAIN else f"{value:.2%}"
    return shown.lstrip("-") if float(shown.rstrip("%")) == 0 else shown


def _bound(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{bucket}: {rows}" for bucket, rows in value.items())
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"
