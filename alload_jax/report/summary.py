"""The summary of a finished run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from alload_jax.errors import InputError
from alload_jax.files import read_json

_LOSS_WINDOW = 50


def summarise(
    rows: list[dict[str, Any]],
    steps: int,
    figures: Mapping[str, float],
    peak_memory: int | None,
    seconds: float,
) -> dict[str, Any]:
    """Summarises a run.

    Args:
      rows: metrics of its steps.
      steps: number of optimizer steps done.
      figures: results of the evaluators, by name.
      peak_memory: peak bytes in use on the fullest device, if known.
      seconds: wall-clock time since the last start, including compilation and sampling.

    Returns:
      The figures by name. `loss_first` and `loss_last` are means over the samples of the first and
      last 50 steps, or of the halves of a shorter run; `imbalance` and `padding` are means over
      steps; `tokens_per_second` excludes padding. `updates_skipped` counts those of
      `optimizer.skip_above`, where it is set.

    Raises:
      InputError: there are no rows.
    """
    if not rows:
        raise InputError("metrics.jsonl of the run folder is empty; there is nothing to summarise")
    column = {name: np.asarray([row[name] for row in rows], np.float64) for name in rows[0]}
    train_seconds = column["step_seconds"].sum()
    memory = {} if peak_memory is None else {"peak_memory_bytes": peak_memory}
    window = max(1, min(_LOSS_WINDOW, len(rows) // 2))
    return {
        **figures,
        **memory,
        "loss_first": _mean_loss(column, slice(None, window)),
        "loss_last": _mean_loss(column, slice(-window, None)),
        "steps": steps,
        "samples_seen": int(column["samples"].sum()),
        "tokens_seen": int(column["tokens"].sum()),
        "tokens_per_second": float(column["tokens"].sum() / train_seconds),
        "steps_per_second": float(len(rows) / train_seconds),
        "imbalance": float(column["imbalance"].mean()),
        "padding": float(column["padding"].mean()),
        "input_wait_share": float(column["input_wait_seconds"].sum() / train_seconds),
        "records_skipped": int(column["skipped"].sum()),
        **_updates_skipped(rows),
        "train_seconds": float(train_seconds),
        "seconds": seconds,
    }


def _updates_skipped(rows: list[dict[str, Any]]) -> dict[str, int]:
    counts = [int(row["update_skipped"]) for row in rows if "update_skipped" in row]
    return {"updates_skipped": sum(counts)} if counts else {}


def read_summary(folder: Path, steps: int) -> dict[str, Any] | None:
    """The summary of a run that finished after `steps` steps; None if there is none.

    Raises:
      InputError: the file is not a JSON object.
    """
    summary = read_json(folder / "summary.json")
    if summary is not None and not isinstance(summary, dict):
        raise InputError(f"{folder / 'summary.json'}: is not a JSON object; remove it")
    return summary if summary and summary.get("steps") == steps else None


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """Prints the summary as a table."""
    table = Table(title=f"{folder}: finished at step {summary['steps']}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in summary.items():
        table.add_row(name.replace("_", " "), _readable(name, value))
    Console(markup=False, soft_wrap=True).print(table)
    drawn = any(path.is_file() for path in (folder / "samples").rglob("*"))
    pictures = f"pictures: {folder / 'samples'}   " if drawn else ""
    print(f"{pictures}figures: {folder / 'summary.json'}")


def _readable(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if name in ("imbalance", "padding", "input_wait_share"):
        return f"{value:.2%}"
    if name.endswith(("per_second", "seconds")):
        return f"{value:,.1f}"
    return f"{value:.4f}"


def _mean_loss(column: dict[str, np.ndarray], part: slice) -> float:
    return float(np.average(column["loss"][part], weights=column["samples"][part]))
