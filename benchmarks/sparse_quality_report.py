"""What benchmarks/sparse_quality.py found: comparisons of pairs of runs, a table, pictures."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from alload_jax.bench.harness import markdown
from alload_jax.files import Json

COLOURS = {"dense": "#444444", "predictor": "#d1495b", "pooled": "#3b7dd8", "random": "#c9a227"}
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for 95 % by number of seeds."""
_ZOOM = 2


def summary(content: Json) -> Json:
    """Compares each variant with `dense`, seed by seed, as JSON values."""
    runs = {(run["variant"], run["seed"]): run for run in content["runs"]}
    found: Json = {}
    for variant in dict.fromkeys(run["variant"] for run in content["runs"]):
        own = [run for run in content["runs"] if run["variant"] == variant]
        pairs = [(runs["dense", r["seed"]], r) for r in own if ("dense", r["seed"]) in runs]
        last = [float(last_levels(run).mean()) for run in own]
        found[variant] = {
            "held_out": spread(last),
            "training": spread([last_training_loss(run) for run in own]),
            "step_seconds": {
                part: statistics.median(run["step_seconds"][part] for run in own)
                for part in ("dense", "last")
            },
            "seconds": spread([run["step_seconds"]["total"] for run in own]),
        } | layer_means(own)
        if variant != "dense" and pairs:
            found[variant]["against_dense"] = compared(content, pairs)
    return found


def layer_means(runs: Sequence[Json]) -> Json:
    """Means over runs of what is known of each layer at the end."""

    def mean(values: Any) -> Any:
        return np.round(np.mean(list(values), axis=0), 4).tolist()

    last = {
        name: mean(np.mean(run["last_layers"][name], axis=-1) for run in runs)
        for name in ("sparsity", "recall", "density")
    }
    held = {"attention_recall": "mass_of_lists", "attention_sparsity": "mass_of_best_lists"}
    masses = {
        name: mean(np.mean([at[key] for at in run["lists"]], axis=(0, 2)) for run in runs)
        for key, name in held.items()
        if all(run["lists"] for run in runs)
    }
    sparse = [[len(each) % 2 for each in run["sparse_from"]] for run in runs]
    return last | masses | {"sparse_layers": np.mean(sparse, axis=0).tolist()}


def compared(content: Json, pairs: Sequence[tuple[Json, Json]]) -> Json:
    """Differences of runs from the dense runs of the same seeds; above 0 the variant is worse."""
    means = [(last_levels(d).mean(), last_levels(v).mean()) for d, v in pairs]
    levels = np.array([last_levels(v) - last_levels(d) for d, v in pairs])
    clips = np.mean([np.subtract(v["last_by_clip"], d["last_by_clip"]) for d, v in pairs], axis=0)
    videos = np.array(content["clips"]["measured_videos"])
    by_video = [float(clips[:, videos == n].mean()) for n in dict.fromkeys(videos.tolist())]
    dense_level = np.mean([last_levels(d) for d, _ in pairs], axis=0)
    attended = [
        float(np.mean(v["last_with_dense_attention"])) - d["held_out"][-1]["mean"] for d, v in pairs
    ]
    first = [first_difference(d, v) for d, v in pairs]
    return {
        "held_out": spread([float(v - d) for d, v in means]),
        "held_out_percent": spread([float(100 * (v / d - 1)) for d, v in means]),
        "by_level": levels.mean(axis=0).round(6).tolist(),
        "by_level_percent": (100 * levels.mean(axis=0) / dense_level).round(3).tolist(),
        "by_level_range": [
            each.round(6).tolist() for each in (levels.min(axis=0), levels.max(axis=0))
        ],
        "by_video": spread(by_video),
        "videos_worse": [sum(each > 0 for each in by_video), len(by_video)],
        "with_dense_attention": spread(attended),
        "training": spread([last_training_loss(v) - last_training_loss(d) for d, v in pairs]),
        "before_switching": max(first),
        "time_to_equal_loss": spread([times_faster(d, v) for d, v in pairs]),
    }


def last_levels(run: Json) -> np.ndarray:
    """Last loss at each noise level, mean over all held-out clips."""
    return np.mean(run["last_by_clip"], axis=1)


def last_training_loss(run: Json) -> float:
    """Mean training loss of the last tenth of the steps."""
    return statistics.fmean(run["loss"][-max(1, len(run["loss"]) // 10) :])


def first_difference(dense: Json, run: Json) -> float:
    """Largest difference of the training losses before the first layer is sparse."""
    switched = min((each[0] for each in run["sparse_from"] if each), default=len(run["loss"]))
    before = slice(0, switched)
    return float(np.abs(np.subtract(dense["loss"][before], run["loss"][before])).max(initial=0))


def times_faster(dense: Json, run: Json) -> float:
    """Training time of the dense run over the run's, until the worse of their last losses."""
    target = max(each["held_out"][-1]["mean"] for each in (dense, run))
    return seconds_until(dense, target) / seconds_until(run, target)


def seconds_until(run: Json, target: float) -> float:
    """Seconds of training until the held-out loss is at a target, between measurements linearly."""
    points = [(each["mean"], each["seconds"]) for each in run["held_out"]]
    for before, after in pairwise(points):
        if after[0] <= target < before[0]:
            share = (before[0] - target) / (before[0] - after[0])
            return before[1] + share * (after[1] - before[1])
    return points[0][1] if points[0][0] <= target else points[-1][1]


def spread(values: Sequence[float]) -> Json:
    """Mean, standard deviation, and half the 95 % interval of the mean, with the values."""
    number = len(values)
    deviation = statistics.stdev(values) if number > 1 else 0.0
    t = _T_95.get(number, 2.0)
    return {
        "mean": round(statistics.fmean(values), 6),
        "deviation": round(deviation, 6),
        "half_interval_95": round(t * deviation / number**0.5, 6) if number > 1 else None,
        "values": [round(each, 6) for each in values],
    }


def table(content: Json) -> str:
    """The comparison, losses by noise level, and layers, as Markdown tables."""
    found = content["summary"]
    rows, by_level, layers = [], [], []
    for name, each in found.items():
        times = [1e3 * each["step_seconds"][part] for part in ("dense", "last")]
        step = f"{times[0]:.1f} → {times[1]:.1f} ms"
        cells, against = ["–"] * 5 + [step, "1×"], each.get("against_dense", {})
        if against:
            percent, training = against["held_out_percent"], against["training"]
            half = percent["half_interval_95"]
            worse, videos = against["videos_worse"]
            cells = [
                f"{percent['mean']:+.2f} %",
                "–" if half is None else f"±{half:.2f} %",
                f"{training['mean']:+.5f}",
                f"{worse} of {videos}",
                f"{against['with_dense_attention']['mean']:+.5f}",
                step,
                f"{against['time_to_equal_loss']['mean']:.2f}×",
            ]
        rows.append([f"`{name}`", f"{each['held_out']['mean']:.5f}", *cells])
        own = [run for run in content["runs"] if run["variant"] == name]
        means = np.mean([last_levels(run) for run in own], axis=0)
        percents = against.get("by_level_percent", [None] * len(means))
        levels = (
            f"{mean:.4f}" + ("" if percent is None else f" ({percent:+.2f} %)")
            for mean, percent in zip(means, percents, strict=True)
        )
        by_level.append([f"`{name}`", *levels])
        for layer, sparse in enumerate(each["sparse_layers"]):
            # Of a layer that is dense, the lists are those that it would have.
            shares = (
                "–"
                if part not in each or (part.startswith("mass") and not sparse)
                else f"{100 * each[part][layer]:.1f} %"
                for part in _OF_LAYERS
            )
            layers.append([f"`{name}`", layer, *shares])
    levels_head = [f"σ = {level}" for level in content["levels"]]
    tables = (
        markdown(_COMPARED, rows),
        markdown(["variant", *levels_head], by_level),
        markdown(["variant", "layer", *_OF_LAYERS.values()], layers),
    )
    return "\n\n".join(tables)


_COMPARED = (
    *("variant", "held-out loss", "against dense", "95 % interval"),
    *("training loss against dense", "videos worse", "evaluated with dense attention"),
    *("step, dense → end", "time to equal loss"),
)
_OF_LAYERS = {
    "sparse_layers": "seeds sparse",
    "sparsity": "sparsity",
    "recall": "recall",
    "density": "density",
    "mass_of_lists": "attention in the lists",
    "mass_of_best_lists": "the best lists",
}

# ---------------------------------------------------------------- pictures


def draw(content: Json, folder: Path) -> None:
    """Draws the losses and the layers: loss.png, layers.png."""
    folder.mkdir(parents=True, exist_ok=True)
    _draw_losses(content, folder / "loss.png")
    _draw_layers(content, folder / "layers.png")


def _draw_losses(content: Json, path: Path) -> None:
    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    variants = list(content["summary"])
    runs = {(run["variant"], run["seed"]): run for run in content["runs"]}
    for name in variants:
        own = [run for run in content["runs"] if run["variant"] == name]
        steps = [each["step"] for each in own[0]["held_out"]]
        curves = np.array([[each["mean"] for each in run["held_out"]] for run in own])
        _band(left, steps, curves, name)
        pairs = [(runs["dense", r["seed"]], r) for r in own if ("dense", r["seed"]) in runs]
        if name == "dense" or not pairs:
            continue
        dense = np.array([[each["mean"] for each in d["held_out"]] for d, _ in pairs])
        paired = np.array([[each["mean"] for each in v["held_out"]] for _, v in pairs])
        _band(middle, steps, 100 * (paired / dense - 1), name)
        levels = np.array([100 * (last_levels(v) / last_levels(d) - 1) for d, v in pairs])
        _band(right, content["levels"], levels, name, marker="o")
    left.set(xlabel="step", ylabel="loss on held-out videos", title="Held-out loss")
    middle.set(xlabel="step", ylabel="above dense of the same seed, %", title="Against dense")
    right.set(xlabel="noise level σ", ylabel="above dense, %", title="Against dense, at the end")
    for axes in (middle, right):
        axes.axhline(0, color=COLOURS["dense"], lw=1)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    seeds = len({run["seed"] for run in content["runs"]})
    figure.suptitle(f"Mean and range of {seeds} seeds", x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=140)


def _band(axes: Axes, x: Sequence[float], values: np.ndarray, name: str, **options: Any) -> None:
    axes.plot(x, values.mean(axis=0), color=COLOURS[name], label=name, **options)
    low, high = values.min(axis=0), values.max(axis=0)
    axes.fill_between(x, low, high, color=COLOURS[name], alpha=0.2, lw=0)


def _draw_layers(content: Json, path: Path) -> None:
    parts = ("sparsity", "recall", "density")
    variants = list(content["summary"])
    figure = Figure(figsize=(3.2 * len(variants) + 1, 5.6), layout="constrained")
    grid = figure.subplots(len(parts), len(variants), squeeze=False, sharex=True, sharey=True)
    for column, name in enumerate(variants):
        own = [run for run in content["runs"] if run["variant"] == name]
        steps = own[0]["layers"]["step"]
        layers = len(own[0]["layers"]["sparsity"][0])
        for axes, part in zip(grid[:, column], parts, strict=True):
            shares = 100 * np.mean([run["layers"][part] for run in own], axis=0).T
            mesh = axes.pcolormesh(
                [0, *steps], np.arange(layers + 1), shares, cmap="viridis", vmin=0, vmax=100
            )
            for run in own:
                for layer, switches in enumerate(run["sparse_from"]):
                    axes.vlines(switches, layer, layer + 1, color="#f85149", lw=1)
            if not column:
                axes.set_ylabel(f"{part}\nlayer")
                axes.set_yticks(np.arange(layers) + 0.5, range(layers))
        grid[0, column].set_title(name)
        grid[-1, column].set_xlabel("step")
    grid[0, 0].invert_yaxis()
    figure.colorbar(mesh, ax=grid, label="%", pad=0.01)
    figure.savefig(path, dpi=140)


def draw_samples(drawn: Path, variants: Sequence[str], folder: Path) -> None:
    """Draws samples.jpg from the arrays in `drawn`: a line for each variant."""
    if not variants or not drawn.exists():
        return
    arrays = dict(np.load(drawn))
    folder.mkdir(parents=True, exist_ok=True)
    lines = [("held-out video", arrays["true"]), ("with noise", arrays["noised"])]
    lines += [(name, arrays[f"{name}_restored"]) for name in variants]
    restored = _sheet("Held-out videos, restored from noise", lines)
    drawn_lines = [(name, arrays[f"{name}_drawn"]) for name in variants]
    samples = _sheet("Samples from noise", drawn_lines)
    width = max(restored.width, samples.width)
    page = Image.new("RGB", (width, restored.height + samples.height), "white")
    page.paste(restored, (0, 0))
    page.paste(samples, (0, restored.height))
    page.save(folder / "samples.jpg", quality=88)


def _sheet(title: str, lines: Sequence[tuple[str, np.ndarray]]) -> Image.Image:
    """A line of frames for each entry: the first, the middle and the last of each clip."""
    clips, frames, height, width, _ = lines[0][1].shape
    shown = (0, frames // 2, frames - 1)
    label, gap, top = 120, 6, 30
    cell = width * _ZOOM
    page = Image.new(
        "RGB",
        (label + clips * (len(shown) * cell + gap), top + len(lines) * (height * _ZOOM + gap)),
        "white",
    )
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=14)
    pen.text((4, 6), title, fill="black", font=font)
    for row, (name, arrays) in enumerate(lines):
        y = top + row * (height * _ZOOM + gap)
        pen.text((4, y + height * _ZOOM // 2), name, fill="black", font=font)
        for clip in range(clips):
            strip = np.concatenate([arrays[clip, frame] for frame in shown], axis=1)
            picture = Image.fromarray(strip).resize((cell * len(shown), height * _ZOOM))
            page.paste(picture, (label + clip * (len(shown) * cell + gap), y))
    return page
