"""The tables that `alload calibrate` prints."""

from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from alload_jax.planning.cost import CostFile


def print_report(costs: CostFile, console: Console) -> None:
    """Prints the points, the fits and the allocator's peak; the file has `details`."""
    assert costs.details
    _print_points(costs.details["points"], f"training steps on {costs.device}", console)
    fits = dict(costs.details["fits"])
    if sparse := costs.details.get("sparse"):
        if sparse["points"]:
            _print_points(sparse["points"], "steps with sparse attention", console)
            fits["sparse"] = sparse
        else:
            console.print(
                "sparse attention: too few steps of model.sparse_attention.min_tokens or more were "
                "measured, so that plans assume its costs; give more --seconds or --longest"
            )
    forms = Table(title="fits", box=rich.box.MARKDOWN)
    for name in ("form", "R²", "mean error", "held out", "coefficients"):
        forms.add_column(name)
    for name, form in fits.items():
        held = form["held_out_mape"]
        forms.add_row(
            name.replace("_", " "),
            "–" if form["r2"] is None else f"{form['r2']:.5f}",
            f"{form['mape']:.2%}",
            "–" if held is None else f"{held:.2%}",
            ", ".join(f"{k} {v:.4g}" for k, v in form["coefficients"].items()),
        )
    console.print(forms)
    if allocator := costs.details["allocator"]:
        console.print(
            f"peak of the allocator {allocator['peak_bytes'] / 1e9:.2f} GB, "
            f"predicted {allocator['relative_error']:+.1%}"
        )


def _print_points(points: list[dict[str, Any]], title: str, console: Console) -> None:
    """A table of measured steps; the last column says the density, or what was held out."""
    last = "density" if "density" in points[0] else "held out"
    table = Table(title=title, box=rich.box.MARKDOWN)
    for name in ("rows", "tokens per row", "measured, s", "predicted, s", "error", last):
        table.add_column(name, justify="right")
    for row in points:
        table.add_row(
            f"{row['rows']:,}",
            f"{row['seq_len']:,}",
            f"{row['seconds']:.4f}",
            f"{row['predicted_seconds']:.4f}",
            f"{row['residual']:+.1%}",
            str(row["density"]) if last == "density" else "yes" if row["held_out"] else "",
        )
    console.print(table)
