"""Bars of a plan page: the cost of every rank in a step, and how long the rank waits."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape

import numpy as np

from alload_jax.planning.metrics import idle_fraction
from alload_jax.report.charts import (
    Axis,
    Tick,
    figure,
    legend,
    linear_axis,
    number,
    plot,
    policy_colour,
    rectangle,
    stretched,
)
from alload_jax.report.plan_figures import cost_scale, percent, show_cost
from alload_jax.report.plan_lengths import LengthClasses
from alload_jax.report.plan_page_data import PolicyPart, StepBars

_MAX_RANKS = 64
_DENSE = 32
_MAX_STEPS = 4
_BAR = 0.8
_SMALLEST = 0.02
_STACKING = ("split", "whole", "padding")


def bars_figure(policies: Sequence[PolicyPart], classes: LengthClasses, unit: str) -> str:
    """Draws steps of every policy on one scale; radio buttons choose the step."""
    count = min(max(len(policy.steps) for policy in policies), _MAX_STEPS)
    if not count:
        return ""
    drawn = [step for policy in policies for step in policy.steps[:count]]
    high = max(float(rank_totals(step).max()) for step in drawn)
    factor, name = cost_scale(high, unit)
    y = linear_axis(high, f"cost of the step ({name})" if name else "cost of the step")
    y = linear_axis(y.high * factor, y.title)
    groups = [_group(policies, n, classes, unit, (y, factor)) for n in range(count)]
    sentence = (
        "Every bar is a rank and stacks the sequences that it computes in one optimizer step. "
        "The step ends when the <b>slowest rank</b> ends; the shaded part is <b>waiting</b>."
    )
    return figure(
        "Who waits for whom",
        sentence,
        _legend(drawn, classes) + _choice(groups, _names(policies, count)),
        "waits",
    )


def rank_totals(step: StepBars) -> np.ndarray:
    """[ranks] total cost of each rank in the step."""
    ranks = np.fromiter((part[0] for part in step.parts), np.int64, len(step.parts))
    costs = np.fromiter((part[1] for part in step.parts), np.float64, len(step.parts))
    return np.bincount(ranks, weights=costs, minlength=max(step.ranks, 1))


def _names(policies: Sequence[PolicyPart], count: int) -> list[str]:
    """Names of the drawn steps: numbers if all policies have the same ones, otherwise letters."""
    steps = [{p.steps[n].step for p in policies if n < len(p.steps)} for n in range(count)]
    if all(len(step) == 1 for step in steps):
        return [f"{step.pop():,}" for step in steps]
    return list("ABCD"[:count])


def _choice(groups: list[str], names: list[str]) -> str:
    """Radio buttons that work without scripts; none if there is only one group."""
    if len(groups) == 1:
        return f'<div class="panels">{groups[0]}</div>'
    inputs = "".join(
        f'<input type="radio" name="step" id="step-{n}"{" checked" if n == 0 else ""}/>'
        f'<label for="step-{n}">{escape(name)}</label>'
        for n, name in enumerate(names)
    )
    panels = "".join(f'<div class="panels panels-{n}">{g}</div>' for n, g in enumerate(groups))
    return f'<div class="choice" role="group" aria-label="Step">Step {inputs}{panels}</div>'


def _group(
    policies: Sequence[PolicyPart],
    index: int,
    classes: LengthClasses,
    unit: str,
    scale: tuple[Axis, float],
) -> str:
    return "".join(
        _panel(policy, policy.steps[index], policy_colour(n, len(policies)), classes, unit, scale)
        for n, policy in enumerate(policies)
        if index < len(policy.steps)
    )


def _panel(
    policy: PolicyPart,
    step: StepBars,
    colour: str,
    classes: LengthClasses,
    unit: str,
    scale: tuple[Axis, float],
) -> str:
    y, factor = scale
    totals = rank_totals(step)
    drawn = min(len(totals), _MAX_RANKS)
    cut = f"first {drawn} of {len(totals):,} ranks" if drawn < len(totals) else ""
    x = _rank_axis(drawn, cut or "rank")
    waits = percent(float(idle_fraction(totals)))
    marks = _stacks(step, drawn, y, factor, classes)
    marks += _lines(totals * factor, y) + _tips(step, totals, drawn, y, factor, unit)
    kind = "tall dense" if drawn > _DENSE else "tall"
    label = (
        f"{policy.name}, step {step.step}: {len(totals):,} ranks, slowest "
        f"{show_cost(float(totals.max()), unit)}, mean {show_cost(float(totals.mean()), unit)}; "
        f"ranks wait {waits} of the time."
    )
    return (
        f'<section class="panel"><h3><i class="chip {colour}"></i>{escape(policy.name)}</h3>'
        f'<p class="wait-share"><b>{waits}</b> waiting <span>in step {step.step:,}</span></p>'
        f"{plot(x, y, marks, label, kind, x_lines=False)}</section>"
    )


def _stacks(step: StepBars, drawn: int, y: Axis, factor: float, classes: LengthClasses) -> str:
    """Draws the bars as one path per colour; adjacent small parts of one colour are merged."""
    paths: dict[str, list[str]] = defaultdict(list)
    paddings = []
    base = np.zeros(drawn)
    for rank, cost, css in _stacked_parts(step, drawn, y.high * _SMALLEST / factor, classes):
        low, high = y.at(base[rank] * factor), y.at((base[rank] + cost) * factor)
        base[rank] += cost
        left, width = 100 * (rank + (1 - _BAR) / 2) / drawn, 100 * _BAR / drawn
        if css == "padding":
            paddings.append(rectangle(left, 100 - high, width, high - low, css))
            continue
        top, tall = 1000 - 10 * high, 10 * (high - low)
        wide = number(10 * width)
        paths[css].append(f"M{number(10 * left)} {number(top)}h{wide}v{number(tall)}h-{wide}z")
    # Split samples are drawn last, so that no neighbour covers their outline.
    ordered = sorted(paths.items(), key=lambda item: (item[0].endswith("split"), item[0]))
    content = "".join(f'<path class="{css}" d="{"".join(d)}"/>' for css, d in ordered)
    end = float(rank_totals(step).max())
    waiting = "".join(
        rectangle(
            100 * (rank + (1 - _BAR) / 2) / drawn,
            100 - y.at(end * factor),
            100 * _BAR / drawn,
            y.at(end * factor) - y.at(base[rank] * factor),
            "waiting",
        )
        for rank in range(drawn)
        if base[rank] < end * 0.999
    )
    return waiting + stretched(content) + "".join(paddings)


def _stacked_parts(
    step: StepBars, drawn: int, smallest: float, classes: LengthClasses
) -> list[tuple[int, float, str]]:
    """(rank, cost, CSS class) from bottom to top: split samples, whole samples, then padding.

    Samples are stacked by decreasing length.
    """
    parts = [part for part in step.parts if part[0] < drawn and part[1] > 0]
    parts.sort(key=lambda part: (part[0], _STACKING.index(part[3]), -part[2]))
    lengths = np.fromiter((part[2] for part in parts), np.int64, len(parts))
    stacked: list[tuple[int, float, str]] = []
    for (rank, cost, _, kind), index in zip(
        parts, classes.position(lengths, classes.count).tolist(), strict=True
    ):
        css = "padding" if kind == "padding" else f"{classes.css(index)} {kind}"
        if (
            stacked
            and stacked[-1][0] == rank
            and stacked[-1][2] == css
            and (kind == "padding" or min(cost, stacked[-1][1]) < smallest)
        ):
            cost += stacked.pop()[1]
        stacked.append((rank, cost, css))
    return stacked


def _lines(totals: np.ndarray, y: Axis) -> str:
    """Lines at the makespan and at the mean, which a perfectly balanced placement would reach."""
    lines = []
    for css, value in (("mean", float(totals.mean())), ("makespan", float(totals.max()))):
        place = number(100 - y.at(value))
        lines.append(f'<line class="{css}" x1="0" x2="100%" y1="{place}%" y2="{place}%"/>')
    return "".join(lines)


def _tips(step: StepBars, totals: np.ndarray, drawn: int, y: Axis, factor: float, unit: str) -> str:
    """Invisible bars whose tooltips describe what each rank computes."""
    spans: dict[int, list[int]] = defaultdict(list)
    for rank, _, seq_len, kind in step.parts:
        if rank < drawn and kind != "padding":
            spans[rank].append(seq_len)
    end = float(totals.max())
    tips = []
    for rank in range(drawn):
        own, wait = spans[rank], 1 - totals[rank] / end if end else 0.0
        text = f"rank {rank}: {show_cost(float(totals[rank]), unit)}, waits {percent(wait)}"
        if own:
            span = f"{min(own):,}" if min(own) == max(own) else f"{min(own):,}–{max(own):,}"
            text += f"; {len(own):,} × {span} tokens"
        top = max(y.at(end * factor), 1)
        tips.append(rectangle(100 * rank / drawn, 100 - top, 100 / drawn, top, "hit", text))
    return "".join(tips)


def _rank_axis(drawn: int, title: str) -> Axis:
    every = max(1, 2 ** int(np.ceil(np.log2(drawn / 8))))
    ticks = tuple(
        Tick(rank + 0.5, str(rank), minor=(rank // every) % 2 == 1)
        for rank in range(0, drawn, every)
    )
    return Axis(0, drawn, ticks, title)


def _legend(drawn: Sequence[StepBars], classes: LengthClasses) -> str:
    kinds = {part[3] for step in drawn for part in step.parts}
    entries = classes.legend()
    if "split" in kinds:
        entries.append(("split key-split", "split"))
    if "padding" in kinds:
        entries.append(("padding", "padding, fixed cost"))
    entries += [("waiting", "waiting"), ("line makespan", "slowest rank"), ("line mean", "mean")]
    return legend(entries, "tokens")
