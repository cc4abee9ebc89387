"""Draws the README's picture: when each GPU computes and when it waits, before and after.

    python benchmarks/waiting_picture.py

Reads the JSON of `alload bench balance` and writes docs/images/waiting.png. Both panels show the
same number of measured steps on one time axis. The steps of two plans contain different samples:
shares of waiting can be compared across panels, durations cannot.
"""

import json
from pathlib import Path

import matplotlib

from alload_jax.files import Json

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alload_jax.errors import InputError

RESULTS = Path("benchmarks/results/balance_mixed_resolution_h200_x4.json")
OUT = Path("docs/images/waiting.png")
BEFORE, AFTER = "equal_tokens-independent", "balanced"
_LABELLED = 0.17
"""Share of a lane that a label needs."""
BUSY, WAITING, TEXT, QUIET = "#1f5fbf", "#f6b98a", "#1c1f26", "#5b6270"


def main() -> None:
    """Reads the measurement and writes the picture."""
    content = json.loads(RESULTS.read_text())
    figure = draw(content, measured(content, BEFORE), measured(content, AFTER))
    figure.savefig(OUT, dpi=100)


def measured(content: Json, name: str) -> Json:
    """The measured case `name`.

    Raises:
      InputError: the case has no GPU times from the profiler.
    """
    for case in content["cases"]:
        if case["case"] == name and case.get("busy"):
            return case
    raise InputError(
        f"{content['workload']}: has no GPU times of {name}; run `alload bench balance` on GPUs"
    )


def draw(content: Json, before: Json, after: Json) -> Figure:
    """Draws two panels with one lane per GPU."""
    figure, axes = plt.subplots(2, 1, figsize=(16, 8.2), facecolor="white")
    figure.subplots_adjust(left=0.08, right=0.72, top=0.8, bottom=0.1, hspace=0.65)
    titles = ("Before: equal tokens per GPU", "After: equal cost per GPU (alload-jax)")
    base = before["figures"]["tokens_per_second"]
    for axis, case, title in zip(axes, (before, after), titles, strict=True):
        lanes(axis, case, max(sum(before["seconds"]), sum(after["seconds"])))
        axis.set_title(title, loc="left", fontsize=26, fontweight="bold", color=TEXT, pad=12)
        annotate(axis, case["figures"], base)
    name = content["device"].removeprefix("NVIDIA ")
    title = f"{content['devices']} {name} GPUs train on images and videos"
    figure.text(0.015, 0.92, title, fontsize=34, fontweight="bold", color=TEXT)
    return figure


def lanes(axis: Axes, case: Json, width: float) -> None:
    """Draws one lane per GPU over `width` seconds; a white line ends each step."""
    begin = 0.0
    longest = max(case["seconds"])
    for whole, busy in zip(case["seconds"], case["busy"], strict=True):
        for gpu, seconds in enumerate(busy):
            axis.barh(gpu, whole, left=begin, height=0.8, color=WAITING)
            axis.barh(gpu, seconds, left=begin, height=0.8, color=BUSY)
            if whole == longest:
                label(axis, begin + seconds / 2, gpu, seconds / width, "computing", "white")
                middle, rest = begin + (seconds + whole) / 2, (whole - seconds) / width
                label(axis, middle, gpu, rest, "waiting", TEXT)
        begin += whole
        axis.axvline(begin, color="white", lw=4)
    gpus = len(case["busy"][0])
    axis.set_yticks(range(gpus), [f"GPU {number}" for number in range(gpus)], fontsize=24)
    axis.set_ylim(gpus - 0.55, -0.45)
    axis.set_xlim(0, width)
    steps = f"seconds of {len(case['seconds'])} training steps"
    axis.set_xlabel(steps, loc="left", fontsize=20, color=QUIET)
    axis.tick_params(length=0)
    axis.tick_params(axis="x", labelsize=18, labelcolor=QUIET)
    for spine in axis.spines.values():
        spine.set_visible(False)


def label(axis: Axes, x: float, gpu: int, share: float, text: str, color: str) -> None:
    """Writes text in the middle of a bar that takes a large enough share of the lane."""
    if share > _LABELLED:
        style: Json = {
            "ha": "center",
            "va": "center",
            "fontsize": 24,
            "fontweight": "bold",
        }
        axis.text(x, gpu, text, color=color, **style)


def annotate(axis: Axes, figures: dict[str, float], base: float) -> None:
    """Writes the panel's figures to the right of its lanes."""
    idle, speed = figures["idle"], figures["tokens_per_second"]
    share = f"{idle:.0%}" if idle >= 0.01 else f"{idle:.1%}"
    times = f"\n{speed / base:.2f}× the speed" if speed != base else ""
    style: Json = {"transform": axis.transAxes, "ha": "left", "va": "top", "color": TEXT}
    axis.text(1.035, 1.0, f"{share} waiting", fontsize=38, fontweight="bold", **style)
    axis.text(1.035, 0.6, f"{speed:,.0f} tokens/s{times}", fontsize=27, linespacing=1.4, **style)


if __name__ == "__main__":
    main()
