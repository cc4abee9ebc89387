"""The speed of block-sparse attention over sparsity, as a picture."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from alload_jax.bench.sparse_attention import Speed, preferred

_COLOURS = ("#1f6feb", "#f0883e", "#3fb950", "#a371f7")
_STYLES = {"random": "-", "zipf": "--"}
_LABELS = {"random": "random lists", "zipf": "some keys popular"}


def write_picture(path: Path, found: Sequence[Speed], device: str) -> None:
    """Draws forward plus backward over cuDNN's dense attention, a line for each length.

    Args:
      path: the PNG to write.
      found: the measured cases; drawn are those of the kernels that "auto" prefers.
      device: name of the device.
    """
    # Only here: matplotlib takes a second to import.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ours = [each for each in found if each.implementation == preferred(found)]
    figure, axis = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
    shapes = list(dict.fromkeys(each.shape for each in ours))
    for shape, colour in zip(shapes, itertools.cycle(_COLOURS), strict=False):
        for popularity, style in _STYLES.items():
            line = sorted(
                (100 * each.sparsity, each.both)
                for each in ours
                if (each.shape, each.popularity) == (shape, popularity)
            )
            if line:
                label = f"{shape.tokens:,} tokens, {_LABELS[popularity]}"
                axis.plot(*zip(*line, strict=True), style, color=colour, marker="o", label=label)
    axis.axhline(1, color="#57606a", lw=1)
    right = axis.get_xlim()[1]
    axis.annotate("cuDNN, dense", (right, 1), ha="right", va="bottom", color="#57606a")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}×")
    axis.set_xlabel("sparsity: pairs of blocks that are left out, %")
    axis.set_ylabel("speed, forward plus backward")
    axis.set_title(f"Block-sparse attention on {device}", loc="left")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)
