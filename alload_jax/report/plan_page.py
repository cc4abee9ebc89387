"""The self-contained HTML page that compares how policies plan a data set."""

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Literal, NamedTuple

import numpy as np
from matplotlib import rc_context

from alload_jax.planning import cost
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.factory import m_comp_curve
from alload_jax.planning.metrics import imbalance
from alload_jax.planning.plan import writing
from alload_jax.planning.study import Case, Study, advice
from alload_jax.report import plan_charts
from alload_jax.report.charts import CSS, STYLE, box_key, percent, policy_colour, show_cost

# ---------------------------------------------------------------- metrics

Value = float | int | None


class Metric(NamedTuple):
    """How a metric is shown; `better` is "" if neither lower nor higher values are better."""

    label: str
    form: Literal["percent", "count", "seconds", "times", "cost"]
    meaning: str
    better: Literal["lower", "higher", ""] = "lower"


METRICS: dict[str, Metric] = {
    "imbalance": Metric(
        "Imbalance", "percent", "How much longer the slowest rank takes than the mean of all ranks."
    ),
    "imbalance_max": Metric(
        "Worst imbalance", "percent", "Largest imbalance of a step in the epoch."
    ),
    "idle": Metric("Idle", "percent", "Share of the ranks' time spent waiting for the slowest."),
    "excess": Metric(
        "Above the bound", "percent", "Makespan relative to a lower bound for any placement."
    ),
    "compute_cv": Metric("Compute CV", "percent", "Standard deviation of B·S² over ranks / mean."),
    "step_cv": Metric("Step CV", "percent", "Standard deviation of step time / mean."),
    "padding": Metric("Padding", "percent", "Share of computed tokens that belong to no sample."),
    "utilisation": Metric(
        "Memory used", "percent", "Real tokens over the M_mem of every micro-batch.", "higher"
    ),
    "step_samples_min": Metric(
        "Fewest samples of a step", "times", "Over the mean number of samples.", "higher"
    ),
    "step_samples_max": Metric(
        "Most samples of a step", "times", "Over the mean number of samples."
    ),
    "longest_weight": Metric(
        "Weight of long samples",
        "times",
        "Weight of the longest tenth of the samples over that of the shortest tenth.",
        "",
    ),
    "longest_weight_by_step": Metric(
        "The same by step",
        "times",
        "If the gradient of each step is divided by its own number of samples.",
        "",
    ),
    "seconds_per_epoch": Metric("Time per epoch", "seconds", "Predicted, with all ranks."),
    "tokens_per_second": Metric("Tokens per second", "count", "Over all ranks.", "higher"),
    "cost": Metric("Cost of the epoch", "cost", "Sum of the steps' makespans."),
    "steps": Metric("Steps", "count", "Optimizer steps of one epoch.", ""),
    "buckets": Metric("Programs", "count", "Distinct micro-batch shapes to compile."),
    "first_step_seconds": Metric(
        "Time to the first step", "seconds", "Predicted, from the start of a run."
    ),
    "dropped": Metric("Dropped", "count", "Samples that were placed too rarely; must be 0."),
    "duplicated": Metric("Duplicated", "count", "Samples that were placed too often; must be 0."),
}
"""Name of a metric → how it is shown, in the order of the table."""


def show(name: str, value: Value) -> str:
    """A metric's value as text; a dash if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    form = METRICS[name].form
    if form == "percent":
        return percent(value)
    if form == "count":
        return f"{value:,.0f}"
    if form == "times":
        return f"{value:.2f}×"
    return show_cost(value, "s" if form == "seconds" else "")


def headline(policies: Sequence[plan_charts.PolicyPart]) -> str:
    """Tiles that compare the baseline with the best policy."""
    before, after = policies[0], policies[-1]
    tiles = []

    def add(title: str, value: str, pair: tuple[Value, Value] | None, meaning: str) -> None:
        """Adds a tile with two thin bars on one scale: the baseline above the best policy."""
        bars = ""
        if pair is not None:
            known = [max(each or 0.0, 0.0) for each in pair]
            widths = (100 * each / (max(known) or 1.0) for each in known)
            bars = "".join(
                f'<i style="background: var(--{colour}); width: {width:.1f}%"></i>'
                for width, colour in zip(widths, ("p0", "best"), strict=True)
            )
            bars = f'<div class="pair" aria-hidden="true">{bars}</div>'
        tiles.append(
            f'<div class="tile"><h2>{title}</h2><p class="value">{value}</p>{bars}'
            f'<p class="meaning">{escape(meaning)}</p></div>'
        )

    for name in ("idle", "imbalance"):
        old, new = before.metrics[name], after.metrics[name]
        text, pair = f'<span class="from">{show(name, old)}</span>', None
        if len(policies) > 1:
            text += f'<span class="arrow" aria-label="to">→</span><b>{show(name, new)}</b>'
            pair = old, new
        add(METRICS[name].label, text, pair, METRICS[name].meaning)
    gain = speedup(before, after)
    if gain is not None and len(policies) > 1:
        meaning = f"Samples in the same time, relative to {before.name}; predicted."
        add("Throughput", f"<b>{gain:.2f}×</b>", (1.0, gain), meaning)
    return f'<div class="tiles">{"".join(tiles)}</div>'


def lede(policies: Sequence[plan_charts.PolicyPart]) -> str:
    """The page's result in one sentence."""
    before, after = policies[0], policies[-1]
    waits = [show("idle", policy.metrics["idle"]) for policy in (before, after)]
    text = f"With <b>{escape(before.name)}</b>, ranks wait <b>{waits[0]}</b> of the time"
    if len(policies) > 1:
        text += f"; with <b>{escape(after.name)}</b>, <b>{waits[1]}</b>"
    return f'<p class="lede">{text}.</p>'


def speedup(before: plan_charts.PolicyPart, after: plan_charts.PolicyPart) -> float | None:
    """Ratio of the speeds of an epoch; None where it costs nothing."""
    for name, faster in (("tokens_per_second", 1), ("cost", -1)):
        first, last = before.metrics.get(name), after.metrics.get(name)
        if first and last:
            return (last / first) ** faster
    return None


def metrics_table(policies: Sequence[plan_charts.PolicyPart]) -> str:
    """A table of metrics (rows) and policies (columns); the best value of a row is bold."""
    head = "".join(
        f'<th scope="col"><i {box_key(policy_colour(n, len(policies)))}></i>'
        f"{escape(policy.name)}</th>"
        for n, policy in enumerate(policies)
    )
    present = {name for policy in policies for name in policy.metrics}
    rows = "".join(_row(name, policies) for name in METRICS if name in present)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Metrics of every policy">'
        f'<table><thead><tr><th scope="col">Metric</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(name: str, policies: Sequence[plan_charts.PolicyPart]) -> str:
    shown = METRICS[name]
    values = [policy.metrics.get(name) for policy in policies]
    texts = [show(name, value) for value in values]
    known = [value for value in values if value is not None and math.isfinite(value)]
    best = None
    if known and shown.better and len(set(texts)) > 1:
        best = show(name, min(known) if shown.better == "lower" else max(known))
    cells = "".join(
        f'<td class="best">{text}</td>' if text == best else f"<td>{text}</td>" for text in texts
    )
    return (
        f'<tr><th scope="row" title="{escape(shown.meaning)}">{shown.label}'
        f"<small>{escape(shown.meaning)}</small></th>{cells}</tr>"
    )


# ---------------------------------------------------------------- the page


def render(
    title: str,
    facts: dict[str, str],
    seq_len: np.ndarray,
    sequence_cost: np.ndarray,
    cost_unit: str,
    policies: Sequence[plan_charts.PolicyPart],
    curve: tuple[np.ndarray, np.ndarray, float] | None = None,
    over_ranks: dict[str, list[tuple[int, float]]] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page as HTML: a data set and how policies plan it. It loads nothing.

    Args:
      title: title of the page.
      facts: settings of the plans: `data`, `ranks`, `M_mem`, `cost model`, …
      seq_len: [N] int64, tokens of every sample of the manifest.
      sequence_cost: [N], cost of each sample alone.
      cost_unit: `s`, or "" if costs have no unit.
      policies: at least one; the first is the baseline, the last the best.
      curve: ([n] values of M_comp, [n] predicted seconds per epoch, chosen M_comp), or None.
      over_ranks: policy → [(ranks, imbalance)]; None or empty for one number of ranks.
      notes: sentences at the end of the page.

    Returns:
      equal text for equal arguments.
    """
    classes = plan_charts.LengthClasses.of(seq_len)
    with rc_context(STYLE):
        sections = [
            plan_charts.lengths_figure(seq_len, sequence_cost, classes),
            plan_charts.bars_figure(policies, classes, cost_unit),
            plan_charts.epoch_figure(policies),
            '<section class="figures"><h2>All figures</h2>'
            "<p>Means over the steps of an epoch; the best value of each row is bold.</p>"
            f"{metrics_table(policies)}</section>",
        ]
        if curve is not None:
            sections.append(plan_charts.curve_figure(*curve))
        if over_ranks:
            sections.append(plan_charts.ranks_figure(over_ranks, policies))
    terms = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    if listed := "".join(f"<li>{escape(note)}</li>" for note in notes):
        sections.append(f'<section class="notes"><h2>Notes</h2><ul>{listed}</ul></section>')
    template = (files("alload_jax.report") / "plan_page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape(title),
        css=CSS,
        lede=lede(policies),
        headline=headline(policies),
        facts=f'<dl class="facts">{terms}</dl>' if facts else "",
        sections="\n".join(filter(None, sections)),
    )


def write_page(path: str | Path, text: str) -> None:
    """Writes what `render` returns, atomically.

    Raises:
      InputError: the path cannot be written.
    """
    with writing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


_DRAWN_AT = (0.25, 0.5, 0.75)
"""Positions of the drawn steps in the epoch, as shares of its steps."""


def write_report(
    path: str | Path, study: Study, cases: Sequence[Case], data: str, cost_model: str
) -> None:
    """Writes the page: cases with the first number of ranks in full, the others as curves.

    Args:
      path: the HTML file to write.
      study: the study of the cases.
      cases: the planned cases; the first is the baseline.
      data: description of the data set.
      cost_model: description of the cost model's source.

    Raises:
      InputError: the path cannot be written.
    """
    ranks = cases[0].ranks
    main = [case for case in cases if case.ranks == ranks]
    typical = study.samples.typical()
    facts = {"data": data, "ranks": f"{ranks:,}"}
    if main[0].plan_m_mem:
        facts["M_mem"] = f"{main[0].plan_m_mem:,} tokens"
    curve = None  # of the first policy that has an M_comp by default
    for case in main:
        if case.config.traits.m_comp_by_default:
            samples = study.samples_of(case.config.policy)
            found = m_comp_curve(case.config, samples, case.plan.topology, study.costs)
            curve = found.m_comp, found.cost, found.chosen
            break
    over_ranks: dict[str, list[tuple[int, float]]] = {}
    if len({case.ranks for case in cases}) > 1:
        for case in cases:
            over_ranks.setdefault(case.name, []).append((case.ranks, case.metrics.imbalance))
    notes = [*advice(study, main)]
    notes.append("A cost model predicts every figure on this page; none is measured.")
    if study.costs.origin == "analytic":
        notes.append(
            "The cost model counts FLOPs and bytes; `alload calibrate` measures one on your device."
        )
    if study.replay:
        notes.append(
            f"The simulation adds noise of {study.replay.noise:.0%} and "
            f"{study.replay.all_reduce:g} s of all-reduce to every step."
        )
    text = render(
        title=f"How to feed {ranks} GPUs",
        facts=facts | {"cost model": cost_model},
        seq_len=typical.seq_len,
        sequence_cost=study.predictor.sequence_cost(typical.seq_len),
        cost_unit="s" if cost.in_seconds(study.predictor) else "",
        policies=[_policy_part(case, study) for case in main],
        curve=curve,
        over_ranks=over_ranks,
        notes=(*notes, f"Cost model: {cost_model}."),
    )
    write_page(path, text)


def _policy_part(case: Case, study: Study) -> plan_charts.PolicyPart:
    epoch = case.epoch
    ranks = cost.rank_costs(epoch, cost.micro_batch_costs(epoch, study.predictor))
    metrics = {k: v for k, v in case.figures()["metrics"].items() if k in METRICS}
    if case.in_seconds:
        metrics["seconds_per_epoch"] = metrics.pop("cost")
    else:
        del metrics["tokens_per_second"]
    drawn = sorted({int(share * (epoch.steps - 1)) for share in _DRAWN_AT})
    bars = tuple(_bars(epoch, step, study.predictor) for step in drawn)
    return plan_charts.PolicyPart(case.name, metrics, bars, imbalance(ranks))


def _bars(epoch: EpochPlan, step: int, model: cost.CostModel) -> plan_charts.StepBars:
    """The samples and padding that each rank of a step computes, with their costs."""
    part = epoch.only(step)
    total = cost.micro_batch_costs(part, model)
    owner, lengths = part.micro_batch_of_part(), part.seq_len[part.sample]
    if part.packing is None:
        costs, is_split = model.sequence_cost(lengths), np.zeros(len(lengths), bool)
    else:
        # Of the tokens as padding, plus a share of their sample's marginal cost.
        tokens, is_split = part.packing.tokens, part.packing.is_split
        share = np.where(is_split, tokens / np.maximum(1, lengths), 1.0)
        costs = model.padding_cost(tokens) + cost.marginal_cost(model, lengths) * share
    rest = total - np.bincount(owner, weights=costs, minlength=len(total))
    columns = (part.rank[owner], costs, lengths, np.where(is_split, "split", "whole"))
    parts = list(zip(*(column.tolist() for column in columns), strict=True))
    parts += [
        (int(rank), float(value), 0, "padding")
        for rank, value in zip(part.rank, rest, strict=True)
        if value > 0
    ]
    return plan_charts.StepBars(step, part.ranks, parts)
