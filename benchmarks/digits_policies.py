"""Compares what a model learns from the digits under several policies.

    python benchmarks/digits_policies.py
    python benchmarks/digits_policies.py --ranks 4 --m-mem 320 --samples 20782 --seeds 0 1 \
        --policies equal_tokens sorted balanced

Trains benchmarks/digits_study.yaml under `equal_tokens` (AdaptiveLoad's baseline),
`dual_constraint` (its method) and packed `balanced` with three seeds each, on as many samples as
under `dual_constraint` with the config's steps. `--ranks` plans for several independent ranks,
which one device computes in turn; on one rank the steps of `sorted` are those of `equal_tokens` in
another order. `--means` compares both ways to divide a gradient. The last weights are evaluated on
all samples with the same noise. Draws docs/results/digits/policies.png (policies_R_ranks.png for R
ranks). Finished runs in the folder of `--runs` are not repeated; `--parallel 5` trains five runs at
once, each in a separate process.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.config import Config, read_config, use_compilation_cache
from alload_jax.data.batch import AnyBatch
from alload_jax.data.collate import BucketedCollation
from alload_jax.data.condition import conditions_for
from alload_jax.data.datasets import prepare_dataset
from alload_jax.data.manifest import Manifest, read_manifest
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError, run_command
from alload_jax.files import Json
from alload_jax.models.families import abstract_model
from alload_jax.planning.epoch import MicroBatch
from alload_jax.planning.factory import make_plan
from alload_jax.planning.plan import Plan
from alload_jax.sharding.mesh import batch_sharding
from alload_jax.training.restore import find_step, one_device_mesh, restore_weights
from alload_jax.training.state import Weights

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "benchmarks" / "digits_study.yaml"
ROWS = 64
"""Samples that the last weights are evaluated on at once."""
NOISE_SEED = 20_000
"""Seed of their noise and noise levels; no run trains with it."""
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
    """Trains, collects the results and draws."""
    parser = benchmark_parser(__doc__, ROOT / "benchmarks" / "results" / "digits_policies_cpu.json")
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    default = ["equal_tokens", "dual_constraint", "balanced"]
    add("--policies", nargs="+", choices=COLOURS, default=default)
    add("--means", nargs="+", choices=("plan", "step"), default=["plan"], help="gradient_mean")
    add("--ranks", type=int, default=1, help="ranks of a step (default 1)")
    add("--m-mem", type=int, help="tokens of a micro-batch (default: the config's)")
    add("--samples", type=int, default=62344, help="of a run (default %(default)s)")
    add("--runs", type=Path, default=ROOT / "runs" / "policies")
    add("--parallel", type=int, default=1, help="runs at once (default 1)")
    options = parser.parse_args(argv)
    chosen = [
        (f"{policy}, {mean}", seed, flags_of(policy, mean, options.ranks, options.m_mem))
        for seed in options.seeds
        for policy in options.policies
        for mean in options.means
    ]
    # Not in the pool, because reading a config temporarily changes the working directory.
    configs = [digits_config("--run.seed", str(seed), *flags) for _, seed, flags in chosen]
    steps = [steps_for(plan_of(config), options.samples) for config in configs]
    with ThreadPoolExecutor(options.parallel) as pool:
        runs = list(pool.map(partial(run, options.runs), *zip(*chosen, strict=True), steps))
    for each, config in zip(runs, configs, strict=True):
        each |= last_loss(config, folder_of(options.runs, each["policy"], each["seed"]))
    sizes = {"samples": options.samples, "ranks": options.ranks, "m_mem": configs[0].planning.m_mem}
    Record(options.out, ["jax", "flax", "numpy"], **sizes, runs=runs).write()
    name = "policies.png" if options.ranks == 1 else f"policies_{options.ranks}_ranks.png"
    draw(runs, PICTURES / name)
    return 0


# ---------------------------------------------------------------- runs


def digits_config(*flags: str) -> Config:
    """The config of a run; prepares its data if they are missing."""
    config = read_config(["--config", str(CONFIG), *flags])
    assert config.data.dataset is not None
    prepare_dataset(config.data.folder, config.data.dataset)
    return config


def plan_of(config: Config) -> Plan:
    """The plan of a run."""
    samples = read_manifest(config.data.folder).samples(config.model.patch_size)
    return make_plan(config.planning, samples, 1, config.run.seed)


def flags_of(policy: str, mean: str, ranks: int, m_mem: int | None) -> list[str]:
    """Flags of `train.py` for a policy, with independent ranks where there are several."""
    flags = ["--planning.policy", policy, "--optimizer.gradient_mean", mean]
    if ranks > 1:
        flags += ["--planning.ranks", str(ranks), "--planning.ranks_mode", "independent"]
    if m_mem:
        flags += ["--planning.m_mem", str(m_mem)]
    return flags


def steps_for(plan: Plan, samples: int) -> int:
    """The smallest number of steps with at least `samples` samples."""
    seen = number = 0
    while seen < samples:
        seen += sum(len(part.samples) for part in plan.step(number).micro_batches)
        number += 1
    return number


def folder_of(runs: Path, policy: str, seed: int) -> Path:
    """The folder of a run."""
    return runs / f"{policy.replace(', ', '_')}_{seed}"


def train(folder: Path, *flags: str) -> None:
    """Trains, unless the run is finished.

    Raises:
      InputError: the run failed.
    """
    if (folder / "summary.json").is_file():
        return
    command = [sys.executable, "train.py", "--config", str(CONFIG), "--run.folder", str(folder)]
    command += flags
    print(f"{folder.name}: {' '.join(flags)}", file=sys.stderr, flush=True)
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        raise InputError(f"{' '.join(command)} failed; run it to see its error")


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


# ---------------------------------------------------------------- the last weights


def last_loss(config: Config, folder: Path) -> Json:
    """Mean loss of the averaged last weights over all samples, and by seq_len."""
    file = folder / "last_loss.json"
    if not file.is_file():
        use_compilation_cache(config.run)
        place = folder / "checkpoints"
        parts = (config.model, config.parameters)
        found = find_step(place, None)
        weights = restore_weights(place, found, *parts, one_device_mesh(), "ema")
        by_length = loss_by_length(config, read_manifest(config.data.folder), weights)
        samples = sum(n for n, _ in by_length.values())
        mean = sum(n * loss for n, loss in by_length.values()) / samples
        file.write_text(json.dumps({"last_loss": mean, "last_loss_by_length": by_length}))
    return json.loads(file.read_text())


def loss_by_length(config: Config, manifest: Manifest, weights: Weights) -> dict[int, list[float]]:
    """Seq_len → [samples, mean loss] over all samples."""
    graph, sharding = abstract_model(config.model).graph, batch_sharding(one_device_mesh())

    @jax.jit
    def sums(weights: Weights, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        model, key = nnx.merge(graph, weights.merged()), jax.random.key(NOISE_SEED)
        result = config.objective(model, batch, key, sharding)
        return result.weight, result.loss

    seq_len = manifest.samples(config.model.patch_size).seq_len
    found: dict[int, np.ndarray] = {}
    for batch in batches_of_one_shape(config, manifest):
        length = int(seq_len[batch.sample[0]])
        added = np.asarray(sums(weights, batch), np.float64)
        found[length] = found.get(length, np.zeros(2)) + added
    return {length: [n, loss / n] for length, (n, loss) in sorted(found.items())}


def batches_of_one_shape(config: Config, manifest: Manifest) -> Iterator[AnyBatch[np.ndarray]]:
    """Yields every sample once, in batches of `ROWS` rows of one shape; the last are padded."""
    collation = BucketedCollation(manifest, conditions_for(config.model, manifest))
    reader = StoreReader(manifest)
    shapes, kind = np.unique(manifest.shape, axis=0, return_inverse=True)
    for number, shape in enumerate(shapes.tolist()):
        members = np.flatnonzero(kind.ravel() == number).tolist()
        for begin in range(0, len(members), ROWS):
            chosen = tuple(members[begin : begin + ROWS])
            part = MicroBatch(0, 0, ROWS, 0, (shape[0], shape[1], shape[2]), chosen)
            batch = collation.empty([part], epoch=0)
            for sample, row in collation.places([part]):
                arrays = reader.read(sample)
                collation.put(batch, row, sample, arrays, collation.conditions.of(arrays))
            yield batch


# ---------------------------------------------------------------- the picture


def curve(rows: list[Json]) -> list[list[float]]:
    """[POINTS, 2]: samples seen, and mean loss of the samples since the previous point.

    A step's loss is the mean over its samples, whose number and kind differ from step to step.
    """
    seen = np.cumsum([0] + [row["samples"] for row in rows])
    total = np.cumsum([0] + [row["loss"] * row["samples"] for row in rows])
    ends = np.linspace(0, seen[-1], POINTS + 1)
    losses = np.diff(np.interp(ends, seen, total)) / np.diff(ends)
    return np.column_stack([ends[1:], losses]).tolist()


def draw(runs: list[Json], picture: Path) -> None:
    """Draws the mean of each policy's loss curves over seeds, and their range."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    policies = list(dict.fromkeys(each["policy"] for each in runs))
    for policy in policies:
        curves = np.asarray([each["loss"] for each in runs if each["policy"] == policy])
        seen, losses = curves[0, :, 0] / 1000, curves[..., 1]
        name, mean = policy.split(", ")
        style: Json = {"color": COLOURS[name], "ls": "-" if mean == "plan" else "--"}
        axes.plot(seen, losses.mean(axis=0), label=policy, **style)
        low, high = losses.min(axis=0), losses.max(axis=0)
        axes.fill_between(seen, low, high, color=COLOURS[name], alpha=0.2, lw=0)
    axes.set(xlabel="thousand samples seen", ylabel="loss, mean over samples", yscale="log")
    title = f"The digits under {len(policies)} policies, {len(curves)} seeds: mean, least and most"
    axes.set_title(title)
    axes.set_yticks([0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.6], minor=False)
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=160)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
