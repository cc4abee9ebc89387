"""The sparsity of a run's attention over training, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_sparsity_picture(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Draws a heat map: a line for each head, layer by layer, and a column for each recorded step.

    A mark shows where a layer's attention becomes sparse, and a fainter one where it is dense
    again. Below it, the density of the lists, the recall and the sparsity, means over all heads.

    Args:
      path: the PNG to write.
      rows: lines of layers.jsonl, at least one: step, sparsity, recall and density
        [layers][heads], sparse [layers].
      title: of the picture.
    """
    # Only here: matplotlib takes a second to import.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = np.array([row["step"] for row in rows])
    values = {
        name: np.array([row[name] for row in rows]) for name in ("sparsity", "density", "recall")
    }
    _, layers, heads = values["sparsity"].shape
    figure, (heat, lines) = plt.subplots(
        2,
        sharex=True,
        figsize=(8.4, 3.2 + 0.09 * layers * heads),
        height_ratios=[max(1.0, 0.05 * layers * heads), 1],
        layout="constrained",
    )
    edges = np.append(0, steps)
    shares = 100 * values["sparsity"].reshape(len(rows), -1).T
    mesh = heat.pcolormesh(
        edges, np.arange(layers * heads + 1), shares, cmap="viridis", vmin=0, vmax=100
    )
    figure.colorbar(mesh, ax=heat, label="sparsity, %", pad=0.01)
    heat.set_yticks(np.arange(layers) * heads + heads / 2, np.arange(layers))
    heat.set_ylabel(f"layer, {heads} heads each")
    heat.invert_yaxis()
    for boundary in range(1, layers):
        heat.axhline(boundary * heads, color="white", lw=0.6)
    for layer, column, begins in _switches(rows):
        top, alpha = layer * heads, 1 if begins else 0.4
        heat.vlines(edges[column], top, top + heads, color="#f85149", lw=2, alpha=alpha)
    for name, colour in (("sparsity", "#1f6feb"), ("recall", "#3fb950"), ("density", "#f0883e")):
        lines.plot(steps, 100 * values[name].mean(axis=(1, 2)), color=colour, label=name)
    lines.set_ylim(0, 102)
    lines.set_xlabel("step")
    lines.set_ylabel("mean, %")
    lines.legend(frameon=False, ncols=3, loc="lower right")
    lines.spines[["top", "right"]].set_visible(False)
    heat.set_title(title, loc="left")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _switches(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int, bool]]:
    """(layer, first column after it, whether it became sparse) of each switch."""
    sparse = np.array([row["sparse"] for row in rows])
    before = np.vstack([np.zeros_like(sparse[:1]), sparse[:-1]])
    places = np.argwhere(sparse != before)
    return [(int(layer), int(at), bool(sparse[at, layer])) for at, layer in places]
