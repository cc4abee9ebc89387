"""The validation loss of a run over training, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.errors import InputError
from alload_jax.training.validation.figures import LOSS, MEASURED_SET

_LEVEL = f"{LOSS}/sigma_"


def write_validation_picture(path: Path, rows: Sequence[dict[str, Any]], title: str) -> int:
    """Draws the loss of each size and at each noise level over the steps.

    A ring marks the lowest loss of all samples. Where the held-out samples or the settings changed
    during the run, losses of the last ones are drawn.

    Args:
      path: the PNG to write.
      rows: validations of metrics.jsonl.
      title: of the picture.

    Returns:
      The step with the lowest loss.

    Raises:
      InputError: no validation has a loss.
    """
    rows = [row for row in rows if LOSS in row]
    if not rows:
        raise InputError("metrics.jsonl holds no validation loss; train with validation.share")
    rows = [row for row in rows if row.get(MEASURED_SET) == rows[-1].get(MEASURED_SET)]
    # Only here: matplotlib takes a second to import.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith(LOSS)))
    levels = [name for name in names if name.startswith(_LEVEL)]
    sizes = [name for name in names if name not in (LOSS, *levels)]
    figure, panels = plt.subplots(ncols=2, sharex=True, figsize=(10, 4.2), layout="constrained")
    for panel, parts, heading in zip(
        panels, (sizes, levels), ("by size", "by noise level σ"), strict=True
    ):
        shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, max(1, len(parts))))
        for name, colour in zip(parts, shades, strict=False):
            label = name.removeprefix(_LEVEL).removeprefix(f"{LOSS}/")
            panel.plot(*_points(rows, name), color=colour, marker=".", lw=1.2, label=label)
        panel.plot(*_points(rows, LOSS), color="black", marker=".", lw=2, label="all")
        panel.set_title(heading, loc="left", fontsize=10)
        panel.set_xlabel("step")
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    best = min(rows, key=lambda row: (row[LOSS], row["step"]))
    panels[0].plot(best["step"], best[LOSS], "o", ms=12, mfc="none", mec="#f85149", mew=1.8)
    panels[0].set_ylabel("validation loss")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return int(best["step"])


def _points(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    known = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in known], [value for _, value in known]
