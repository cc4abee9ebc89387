"""Renders a self-contained HTML page that compares how policies plan a data set."""

from html import escape
from importlib.resources import files
from pathlib import Path

from alload_jax.errors import InputError
from alload_jax.files import replacing
from alload_jax.planning.files import replaceable
from alload_jax.report.plan_bars import bars_figure
from alload_jax.report.plan_curves import curve_figure, epoch_figure, ranks_figure
from alload_jax.report.plan_figures import headline, lede, metrics_table
from alload_jax.report.plan_lengths import LengthClasses, lengths_figure
from alload_jax.report.plan_page_data import PlanPage, PolicyPart, StepBars

__all__ = ["PlanPage", "PolicyPart", "StepBars", "render", "write_page"]

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<meta name="generator" content="alload-jax"/>
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
{patterns}
<header>
<p class="eyebrow">How a data set is planned</p>
<h1>{title}</h1>
{lede}
{headline}
{facts}
</header>
<main>
{sections}
</main>
<footer>Made by alload-jax.
Costs and times are predictions of the cost model, before any run.</footer>
<div id="tip" role="status" hidden></div>
<script>
{script}</script>
</body>
</html>
"""

# Patterns are defined in pixels, so that they do not scale with the chart that they fill.
_PATTERNS = (
    '<svg class="patterns" width="0" height="0" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="hatch-paper" width="6" height="6"/>'
    '<line class="hatch-line" x1="0" x2="0" y1="0" y2="6"/></pattern></defs></svg>'
)

# Without this script browsers show the same texts as titles, after a delay.
_SCRIPT = """(function () {
  var tip = document.getElementById("tip");
  document.querySelectorAll("svg title").forEach(function (title) {
    title.parentNode.setAttribute("data-tip", title.textContent);
    title.remove();
  });
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", function () { tip.hidden = true; }, { passive: true });
  function show(event) {
    var mark = event.target.closest && event.target.closest("[data-tip]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.getAttribute("data-tip");
    var width = document.documentElement.clientWidth;
    var left = Math.min(event.clientX + 12, width - tip.offsetWidth - 8);
    var above = event.clientY - tip.offsetHeight - 12;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above < 8 ? event.clientY + 20 : above) + "px";
  }
})();
"""


def render(page: PlanPage) -> str:
    """The page as HTML. It loads nothing, and equal pages give equal text."""
    return _TEMPLATE.format(
        title=escape(page.title),
        css=(files("alload_jax.report") / "plan_page.css").read_text(encoding="utf-8"),
        patterns=_PATTERNS,
        lede=lede(page.policies),
        headline=headline(page.policies, page.cost_unit),
        facts=_facts(page.facts),
        sections="\n".join(_sections(page)),
        script=_SCRIPT,
    )


def write_page(path: str | Path, page: PlanPage) -> None:
    """Writes the page atomically.

    Raises:
      InputError: the path cannot be written.
    """
    path = replaceable(path)
    text = render(page)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}); name another file") from error


def _sections(page: PlanPage) -> list[str]:
    classes = LengthClasses.of(page.seq_len)
    parts = [
        lengths_figure(page.seq_len, page.sequence_cost, classes),
        bars_figure(page.policies, classes, page.cost_unit),
        epoch_figure(page.policies),
        _table(page),
    ]
    if page.curve is not None:
        parts.append(curve_figure(*page.curve))
    if page.over_ranks:
        parts.append(ranks_figure(page.over_ranks, page.over_ranks_metric, page.policies))
    parts.append(_notes(page.notes))
    return [part for part in parts if part]


def _facts(facts: dict[str, str]) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    return f'<dl class="facts">{items}</dl>' if items else ""


def _table(page: PlanPage) -> str:
    return (
        '<section class="figures"><h2>All figures</h2>'
        "<p>Means over the steps of an epoch; the best value of each row is bold.</p>"
        f"{metrics_table(page.policies, page.cost_unit)}</section>"
    )


def _notes(notes: tuple[str, ...]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="notes"><h2>Notes</h2><ul>{items}</ul></section>' if items else ""
