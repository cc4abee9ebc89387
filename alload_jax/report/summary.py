"""What a run prints of its plan at the start, and its summary at the end."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from alload_jax.distributed.cluster import first_process
from alload_jax.errors import InputError, one_line, print_stderr
from alload_jax.files import read_json
from alload_jax.planning.cost import CostModel, in_seconds
from alload_jax.planning.metrics import PlanMetrics, padding_ratio, plan_metrics
from alload_jax.planning.plan import Plan
from alload_jax.planning.stream import StreamPlan

_POOR_FILL = 0.6
"""Share of M_mem that micro-batches fill on average, below which the plan is poor."""
_FEW_SAMPLES = 20
"""Samples for each program to compile, below which programs are too many."""
_ONLY_AT_START = ("run.initial_weights", "run.initial_lora")
"""Settings that only a run without a checkpoint reads."""
_NAMED = 6
"""Most changed settings that are named."""
_LEAST_SQUARE, _MOST_SQUARE = 0.05, 4.0
"""Mean squares beyond which latents were hardly made for such models. Pixels from −1 to 1 and
normalised latents have 0.3 to 2."""


def show_opening(lines: Sequence[str], warnings: Sequence[str]) -> None:
    """Prints what the run will do; warnings go to stderr. Only the first process prints."""
    if not first_process():
        return
    print("\n".join(map(one_line, filter(None, lines))), flush=True)
    for warning in warnings:
        print_stderr(one_line(f"warning: {warning}"))


def opening_lines(
    plan: Plan,
    policy: str,
    m_mem: int | None,
    cost_model: CostModel,
    timed: bool,
    steps: int,
    start: int,
    weights: str,
    excluded: int = 0,
    validation: str = "",
    policy_reason: str = "",
    doubts: Sequence[str] = (),
) -> tuple[list[str], list[str]]:
    """Lines on what the run will do, and warnings about its plan.

    Args:
      plan: of the run.
      policy: name of its policy.
      m_mem: most tokens of a micro-batch; None if not bounded.
      cost_model: that the plan is balanced by.
      timed: whether its seconds are those of these devices.
      steps: optimizer steps of the run.
      start: steps done already.
      weights: where the weights come from.
      excluded: number of samples that are left out.
      validation: what is validated and when; "" for nothing.
      policy_reason: why auto took the policy; "" if the config names it.
      doubts: what may surprise of the data, such as what the model does not take.
    """
    seq_len = plan.samples.seq_len
    found = plan_metrics(plan.epoch(0), cost_model, m_mem)
    epochs = steps / found.steps
    lengths = f"{seq_len.min():,} to {seq_len.max():,} tokens"
    left_out = f" ({excluded:,} left out)" if excluded else ""
    counts, ranks = plan.epoch(0).counts, plan.topology.ranks
    fill = f"{found.padding:.1%} padding"
    if found.utilisation is not None:
        fill = f"{found.utilisation:.0%} of m_mem ({m_mem:,} tokens) filled, {fill}"
    predicted = []
    if timed and in_seconds(cost_model):  # of these devices
        each = found.cost / found.steps
        hours = each * max(0, steps - start) / 3600
        predicted.append(
            f"predicted: {each:,.2f} s a step, {hours:,.1f} h for what is left, without "
            f"compilation; ranks wait {found.idle:.1%} of the time"
        )
    weighted = "" if counts is None else f", {counts.sum():,} an epoch by data.weights,"
    data = f"{len(seq_len):,} samples{left_out}{weighted} of {lengths}; an epoch has "
    data += f"{found.steps:,} steps, the run {steps:,} ({epochs:,.1f} epochs)"
    if isinstance(plan, StreamPlan):
        data = f"a stream of samples of {lengths}, planned in windows of about {found.steps:,} "
        data += f"steps; the run has {steps:,}"
    lines = [
        f"data: {data}",
        f"steps: {found.samples / found.steps:,.1f} samples on {ranks:,} rank{'s' * (ranks > 1)} "
        f"by {policy}, {fill}; programs to compile: {found.buckets}",
        *([policy_reason] if policy_reason else []),
        *predicted,
        f"weights: {weights}",
        *([f"validation: {validation}"] if validation else []),
    ]
    return lines, [*doubts, *_warnings(found, len(seq_len))]


def changed_settings(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """A line on the settings that differ from a run's last start; "" if none does.

    Args:
      before: values of the last start by dotted key; missing ones were not known then.
      now: values of this start.
    """
    other = [key for key, value in now.items() if key in before and before[key] != value]
    if not other:
        return ""
    named = [f"{key} {before[key]} → {now[key]}" for key in other[:_NAMED]]
    more = f" and {len(other) - _NAMED} more" if len(other) > _NAMED else ""
    return f"changed since the last start: {', '.join(named)}{more}"


def unused_settings(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """What a run that goes on from a checkpoint does not read, though it changed; "" for nothing.

    Args:
      before, now: as in `changed_settings`.
    """
    other = [key for key in _ONLY_AT_START if key in before and before[key] != now[key]]
    if not other:
        return ""
    named = " and ".join(f"{key} {now[key]}" for key in other)
    return (
        f"{named}: not used, as the run goes on with the weights of its checkpoint; name another "
        "run.folder to begin with it"
    )


def scale_warning(found: float | None) -> str:
    """What is to be said of a mean square; empty if it is usual."""
    if found is None or _LEAST_SQUARE <= found <= _MOST_SQUARE:
        return ""
    return (
        f"the latents have a mean square of {found:.3g}, and models are trained on about 1; "
        "normalise them by the mean and deviation of their VAE, and prepare the data again"
    )


def _warnings(found: PlanMetrics, samples: int) -> list[str]:
    warnings = []
    if found.utilisation is not None and found.utilisation < _POOR_FILL:
        warnings.append(
            f"micro-batches fill {found.utilisation:.0%} of planning.m_mem on average; lower "
            "planning.m_mem, raise planning.m_comp, or compare policies with `alload plan`"
        )
    if found.buckets > 1 and samples < _FEW_SAMPLES * found.buckets:
        warnings.append(
            f"{found.buckets} programs are compiled for {samples:,} samples; prepare fewer sizes, "
            "lower planning.max_programs, or choose a packed planning.policy where the device has "
            "one"
        )
    return warnings


_LOSS_WINDOW = 50
_TIMES = ("step_seconds", "input_wait_seconds")
_SUMMARISED = ("loss", "samples", "tokens", "padding", "imbalance", *_TIMES, "skipped")
_SKIPPED = "update_skipped"
"""Figures of each step, and one of some runs' alone."""


def summarise(
    rows: Iterable[Mapping[str, float]],
    steps: int,
    figures: Mapping[str, float],
    peak_memory: int | None,
    seconds: float,
) -> dict[str, float]:
    """Summarises a run.

    Args:
      rows: metrics of its steps.
      steps: number of optimizer steps done.
      figures: results of the evaluators, by name.
      peak_memory: peak bytes in use on the fullest device, if known.
      seconds: wall-clock time since the last start, including compilation and sampling.

    Returns:
      The figures by name. `loss_first` and `loss_last` are means over the samples of the first and
      last 50 steps, or of the halves of a shorter run; `imbalance` is the mean over steps, and
      `padding` the share of all computed tokens, as in `PlanMetrics`; `tokens_per_second` excludes
      padding. `updates_skipped` counts those of `optimizer.skip_above`, where it is set.

    Raises:
      InputError: there are no rows.
    """
    found = ([row[name] for name in _SUMMARISED] + [row.get(_SKIPPED, -1)] for row in rows)
    column = np.fromiter(map(tuple, found), [(name, float) for name in (*_SUMMARISED, _SKIPPED)])
    if not len(column):
        raise InputError("metrics.jsonl of the run folder is empty; there is nothing to summarise")
    filled = 1 - column["padding"]  # 0 where all samples of a step are left out
    computed = np.divide(column["tokens"], filled, out=np.zeros_like(filled), where=filled > 0)
    train_seconds = column["step_seconds"].sum()
    memory = {} if peak_memory is None else {"peak_memory_bytes": peak_memory}
    window = max(1, min(_LOSS_WINDOW, len(column) // 2))
    skipped = column[_SKIPPED][column[_SKIPPED] >= 0]  # -1: before or without skip_above
    return {
        **figures,
        **memory,
        "loss_first": _mean_loss(column, slice(None, window)),
        "loss_last": _mean_loss(column, slice(-window, None)),
        "steps": steps,
        "samples_seen": int(column["samples"].sum()),
        "tokens_seen": int(column["tokens"].sum()),
        "tokens_per_second": float(column["tokens"].sum() / train_seconds),
        "steps_per_second": float(len(column) / train_seconds),
        "imbalance": float(column["imbalance"].mean()),
        "padding": float(padding_ratio(column["tokens"].sum(), max(1, computed.sum()))),
        "input_wait_share": float(column["input_wait_seconds"].sum() / train_seconds),
        "records_skipped": int(column["skipped"].sum()),
        **({"updates_skipped": int(skipped.sum())} if len(skipped) else {}),
        "train_seconds": float(train_seconds),
        "seconds": seconds,
    }


def read_summary(folder: Path, steps: int) -> dict[str, float] | None:
    """The summary of a run that finished after `steps` steps; None if there is none.

    Raises:
      InputError: the file is not a JSON object.
    """
    summary = read_json(folder / "summary.json")
    if summary is not None and not isinstance(summary, dict):
        raise InputError(f"{folder / 'summary.json'}: is not a JSON object; remove it")
    return summary if summary and summary.get("steps") == steps else None


def print_summary(summary: Mapping[str, float], folder: Path) -> None:
    """Prints the summary as a table."""
    title = f"{folder}: finished at step {summary['steps']}"
    table = Table("figure", Column("value", justify="right"), title=title, title_justify="left")
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


def _mean_loss(column: np.ndarray, part: slice) -> float:
    return float(np.average(column["loss"][part], weights=column["samples"][part]))
