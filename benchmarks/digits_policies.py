"""Compares what a model learns from the digits under several policies.

    python benchmarks/digits_policies.py
    python benchmarks/digits_policies.py --ranks 4 --m-mem 320 --samples 20782 --seeds 0 1 \
        --policies equal_tokens sorted balanced

Trains benchmarks/digits_study.yaml under `equal_tokens` (AdaptiveLoad's baseline),
`dual_constraint` (its method) and packed `balanced` with three seeds each, on as many samples as
under `dual_constraint` with the config's steps. `--ranks` plans for several independent ranks,
which one device computes in turn; on one rank the steps of `sorted` are those of `equal_tokens` in
another order. `--means` compares both ways to divide a gradient. The last weights are evaluated on
all samples with the same noise. Writes benchmarks/results/digits_policies_{device}.json and
docs/results/digits/policies.png (policies_R_ranks.png for R ranks) and prints a table. Finished
runs in the folder of `--runs` are not repeated; `--parallel 5` trains five runs at once, each in a
separate process.
"""

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from digits_model import (
    RESULTS,
    ROOT,
    digits_config,
    loss_by_length,
    plan_of,
    train,
    weights_of_run,
)
from matplotlib.figure import Figure

from alload_jax.bench.harness import Record, markdown
from alload_jax.config import Config, use_compilation_cache
from alload_jax.data.manifest import read_manifest
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.planning.plan import Plan

PICTURES = ROOT / "docs" / "results" / "digits"
COLOURS = {
    "equal_tokens": "#888888",
    "dual_constraint": "#3b7dd8",
    "sorted": "#2f9e62",
    "balanced": "#d1495b",
}
POINTS = 60
"""Points of a curve; each is the mean loss of an equal number of samples."""


def main(argv: list[str]) -> int:
    """Trains, collects the results, draws and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    default = ["equal_tokens", "dual_constraint", "balanced"]
    parser.add_argument("--policies", nargs="+", choices=COLOURS, default=default)
    parser.add_argument(
        "--means", nargs="+", choices=("plan", "step"), default=["plan"], help="gradient_mean"
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a step (default 1)")
    parser.add_argument("--m-mem", type=int, help="tokens of a micro-batch (default: the config's)")
    parser.add_argument(
        "--samples", type=int, help="samples of a run (default: those of the config's steps)"
    )
    parser.add_argument(
        "--steps", type=int, help="steps that give the samples (default: the config's)"
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "policies")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once (default 1)")
    parser.add_argument("--device", default="cpu", help="name for the JSON (default cpu)")
    options = parser.parse_args(argv)
    samples = options.samples or samples_of_default(options.steps)
    chosen = [
        (f"{policy}, {mean}", seed, flags_of(policy, mean, options.ranks, options.m_mem))
        for seed in options.seeds
        for policy in options.policies
        for mean in options.means
    ]
    # Not in the pool, because reading a config temporarily changes the working directory.
    configs = [digits_config("--run.seed", str(seed), *flags) for _, seed, flags in chosen]
    steps = [steps_for(plan_of(config), samples) for config in configs]
    with ThreadPoolExecutor(options.parallel) as pool:
        runs = list(pool.map(partial(run, options.runs), *zip(*chosen, strict=True), steps))
    for each, config in zip(runs, configs, strict=True):
        each |= last_loss(config, folder_of(options.runs, each["policy"], each["seed"]))
    found = {
        policy: [each for each in runs if each["policy"] == policy]
        for policy in dict.fromkeys(policy for policy, *_ in chosen)
    }
    out = RESULTS / f"digits_policies_{options.device}.json"
    sizes = {"samples": samples, "ranks": options.ranks, "m_mem": configs[0].planning.m_mem}
    Record(out, ["jax", "flax", "numpy"], **sizes, runs=runs).write()
    name = "policies.png" if options.ranks == 1 else f"policies_{options.ranks}_ranks.png"
    draw(found, PICTURES / name)
    print(table(found))
    return 0


def samples_of_default(steps: int | None) -> int:
    """Number of samples in the steps of the config under `dual_constraint`."""
    config = digits_config(*flags_of("dual_constraint", "plan", 1, None))
    plan = plan_of(config)
    return sum(step_samples(plan, number) for number in range(steps or config.run.given_steps))


def flags_of(policy: str, mean: str, ranks: int, m_mem: int | None) -> list[str]:
    """Flags of `train.py` for a policy, with independent ranks where there are several."""
    flags = ["--planning.policy", policy, "--optimizer.gradient_mean", mean]
    if ranks > 1:
        flags += ["--planning.ranks", str(ranks), "--planning.ranks_mode", "independent"]
    if m_mem:
        flags += ["--planning.m_mem", str(m_mem)]
    return flags


def step_samples(plan: Plan, number: int) -> int:
    """Number of samples in a step."""
    return sum(len(part.samples) for part in plan.step(number).micro_batches)


def steps_for(plan: Plan, samples: int) -> int:
    """The smallest number of steps with at least `samples` samples."""
    seen = number = 0
    while seen < samples:
        seen += step_samples(plan, number)
        number += 1
    return number


def folder_of(runs: Path, policy: str, seed: int) -> Path:
    """The folder of a run."""
    return runs / f"{policy.replace(', ', '_')}_{seed}"


def run(runs: Path, policy: str, seed: int, flags: list[str], steps: int) -> Json:
    """Trains, unless the run is finished, and returns its results."""
    folder = folder_of(runs, policy, seed)
    train(folder, "--run.seed", str(seed), "--run.steps", str(steps), *flags)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "policy": policy,
        "seed": seed,
        "steps": len(rows),
        "samples": sum(row["samples"] for row in rows),
        "digit_accuracy": summary["digit_accuracy"],
        "loss": curve(rows),
    }


def last_loss(config: Config, folder: Path) -> Json:
    """Mean loss of the averaged last weights over all samples, and by seq_len."""
    file = folder / "last_loss.json"
    if not file.is_file():
        use_compilation_cache(config.run)
        weights = weights_of_run(config, folder, "ema")
        by_length = loss_by_length(config, read_manifest(config.data.folder), weights)
        samples = sum(n for n, _ in by_length.values())
        mean = sum(n * loss for n, loss in by_length.values()) / samples
        file.write_text(json.dumps({"last_loss": mean, "last_loss_by_length": by_length}))
    return json.loads(file.read_text())


def curve(rows: list[Json]) -> list[list[float]]:
    """[POINTS, 2]: samples seen, and mean loss of the samples since the previous point.

    A step's loss is the mean over its samples, whose number and kind differ from step to step.
    """
    seen = np.cumsum([0] + [row["samples"] for row in rows])
    total = np.cumsum([0] + [row["loss"] * row["samples"] for row in rows])
    ends = np.linspace(0, seen[-1], POINTS + 1)
    losses = np.diff(np.interp(ends, seen, total)) / np.diff(ends)
    return np.column_stack([ends[1:], losses]).tolist()


def draw(found: dict[str, list[Json]], picture: Path) -> None:
    """Draws the mean of each policy's loss curves over seeds, and their range."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for policy, group in found.items():
        curves = np.asarray([each["loss"] for each in group])
        seen, losses = curves[0, :, 0] / 1000, curves[..., 1]
        name, mean = policy.split(", ")
        style: Json = {"color": COLOURS[name], "ls": "-" if mean == "plan" else "--"}
        axes.plot(seen, losses.mean(axis=0), label=policy, **style)
        axes.fill_between(
            seen, losses.min(axis=0), losses.max(axis=0), color=COLOURS[name], alpha=0.2, lw=0
        )
    axes.set(xlabel="thousand samples seen", ylabel="loss, mean over samples", yscale="log")
    axes.set_title(
        f"The digits under {len(found)} policies, {len(group)} seeds: mean, least and most"
    )
    axes.set_yticks([0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.6], minor=False)
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=160)


def table(found: dict[str, list[Json]]) -> str:
    """The results as a Markdown table."""
    rows = []
    for policy, group in found.items():
        last = [
            statistics.fmean(loss for _, loss in each["loss"][-POINTS // 20 :]) for each in group
        ]
        figures = [[each[name] for each in group] for name in ("last_loss", "digit_accuracy")]
        steps = statistics.fmean(each["steps"] for each in group)
        rows.append([f"`{policy}`", f"{steps:,.0f}", *map(spread, (last, *figures))])
    losses = ("loss of the last 5 % of samples", "loss of the last weights")
    return markdown(("policy", "steps", *losses, "digit accuracy"), rows)


def spread(values: list[float]) -> str:
    """Mean and range of the values as text."""
    return f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
