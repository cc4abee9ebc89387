"""Draws when each GPU computes and when it is idle, for two policies."""

from pathlib import Path
from typing import Any

_BUSY, _IDLE = "#3b7dd8", "#e8e8e8"
_MAX_STEPS = 6


def write_picture(path: Path, content: dict[str, Any]) -> None:
    """Draws the first case and the fastest `balanced` case (or the fastest case of all).

    Args:
      path: the PNG to write.
      content: the JSON of `alload bench balance`.

    Raises:
      ValueError: no case was measured on GPUs.
    """
    cases = [case for case in content["cases"] if case.get("busy")]
    if not cases:
        raise ValueError(f"{path}: no case was measured on GPUs; measure on GPUs")
    ours = [case for case in cases if case["case"].startswith("balanced")]
    best = max(ours or cases, key=lambda case: case["figures"]["tokens_per_second"])
    # Imported here because matplotlib takes a second to import.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [cases[0], best] if best is not cases[0] else [best]
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(9, 1.6 + 1.5 * len(shown)), sharex=True, squeeze=False
    )
    for axis, case in zip(axes[:, 0], shown, strict=True):
        _draw(axis, case)
    axes[-1, 0].set_xlabel("seconds")
    where = f"{content['devices']} × {content['device']}"
    figure.suptitle(
        f"{content['workload']}, {where}: computing (blue) and idle (grey) in some steps",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(axis: Any, case: dict[str, Any]) -> None:
    begin = 0.0
    for whole, busy in list(zip(case["seconds"], case["busy"], strict=True))[:_MAX_STEPS]:
        for rank, seconds in enumerate(busy):
            axis.barh(rank, seconds, left=begin, height=0.7, color=_BUSY)
            axis.barh(rank, whole - seconds, left=begin + seconds, height=0.7, color=_IDLE)
        begin += whole
        axis.axvline(begin, color="black", lw=0.6)
    axis.set_yticks(range(len(case["busy"][0])), [f"GPU {n}" for n in range(len(case["busy"][0]))])
    axis.invert_yaxis()
    figures = case["figures"]
    speed, idle = figures["tokens_per_second"], figures["idle"]
    title = f"{case['case']}: {speed:,.0f} tokens/s, idle {idle:.1%}"
    axis.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
