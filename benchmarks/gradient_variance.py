"""Measures how far the gradient of a planned step is from the gradient over all data.

    python benchmarks/gradient_variance.py

Trains benchmarks/digits_study.yaml for 500 steps and takes the weights of step 100 and of step 500.
With these it computes the gradient of each of the 22,896 samples, once, with the sample's own noise
and noise level. A sample has the same noise in every layout, so the gradient of a step of any
policy on any number of ranks is the mean of its samples' gradients. Epochs are planned by each
policy and compared with samples drawn i.i.d., with the mean of a step over samples and over tokens
(`objective.weighting`). Gradients are kept as 4,096 signed sums of parameters, whose inner products
are those of the gradients without bias. One step of each policy is also computed by the training
program and compared.

Writes benchmarks/results/gradient_variance_{device}.json and prints a table. Finished parts in
runs/gradient_variance are not repeated.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from digits_model import NOISE_SEED, batches_of_one_shape, loss_sums, weights_of_run
from gradient_statistics import (
    Population,
    bias,
    epoch_figures,
    interval,
    relative_weights,
)

from alload_jax.bench.provenance import provenance
from alload_jax.config import Config, read_config, use_compilation_cache
from alload_jax.data.collate import Collator
from alload_jax.data.collation import collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.datasets.dataset import prepare_dataset
from alload_jax.data.manifest import Manifest, read_manifest
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError, run_command
from alload_jax.planning.factory import make_plan
from alload_jax.planning.plan import Plan
from alload_jax.run.training import training_spec
from alload_jax.training.restore import one_device_mesh
from alload_jax.training.state import Weights
from alload_jax.training.step import make_accumulate, zero_accumulator

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "benchmarks" / "digits_study.yaml"
CASES = (
    ("balanced", "synchronous"),
    ("sorted", "independent"),
    ("equal_tokens", "independent"),
    ("dual_constraint", "synchronous"),
)
"""Policies and whether ranks share a bucket; packed ranks never do."""
IID = "i.i.d."
SIZE = 4096
"""K, numbers that are kept of a gradient."""
ROWS = 16
"""Samples whose gradients are computed at once."""

Draw = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Epoch number → ([P] samples, [P] their steps)."""


def main(argv: list[str]) -> int:
    """Trains, computes the gradients of samples, and compares the policies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 500], help="of the weights")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--epochs", type=int, default=8, help="planned epochs of each case")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gradient_variance")
    parser.add_argument("--device", default="cpu", help="name for the JSON (default cpu)")
    options = parser.parse_args(argv)
    config = read_config(["--config", str(CONFIG)])
    assert config.data.dataset is not None
    prepare_dataset(config.data.folder, config.data.dataset)
    use_compilation_cache(config.run)
    train(options.folder, options.steps)
    manifest = read_manifest(config.data.folder)
    found = []
    for number in options.steps:
        weights = weights_of_run(config, options.folder, "raw", number)
        gradients = sample_gradients(config, manifest, weights, options.folder / f"{number}.npy")
        rows = compare(config, manifest, weights, gradients, options.ranks, options.epochs)
        found += [{"weights_of_step": number} | row for row in rows]
    content = provenance(["jax", "flax", "numpy", "scipy"]) | {
        "command": " ".join(["python", "benchmarks/gradient_variance.py", *argv]),
        "samples": len(manifest),
        "numbers_per_gradient": SIZE,
        "interval": "[mean, half-width of the 95 % interval over epochs]",
        "cases": found,
    }
    out = ROOT / "benchmarks" / "results" / f"gradient_variance_{options.device}.json"
    out.write_text(json.dumps(content, indent=1) + "\n")
    print(table(found))
    return 0


# ------------------------------------------------------------------ gradients


def train(folder: Path, steps: list[int]) -> None:
    """Trains the config's model for the last of `steps`, unless done, with a checkpoint at each."""
    if all((folder / "checkpoints" / str(number)).is_dir() for number in steps):
        return
    every = int(np.gcd.reduce(steps))
    command = [sys.executable, "train.py", "--config", str(CONFIG), "--run.folder", str(folder)]
    command += ["--run.steps", str(max(steps)), "--planning.policy", "dual_constraint"]
    command += ["--checkpoint.every", str(every), "--checkpoint.keep_every", str(every)]
    command += ["--evaluators", "[]"]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        raise InputError(f"{' '.join(command)} failed; run it to see its error")


def sketch(gradient: Any) -> jax.Array:
    """Sums parameters with random signs, [K] float32; the mean of ⟨Sx, Sy⟩ over signs is ⟨x, y⟩."""
    total = jnp.zeros(SIZE)
    for number, leaf in enumerate(jax.tree.leaves(gradient)):
        sign = jax.random.rademacher(jax.random.key(number), leaf.shape, jnp.float32)
        signed = (leaf * sign).ravel()
        total += jnp.pad(signed, (0, -leaf.size % SIZE)).reshape(-1, SIZE).sum(axis=0)
    return total


def sample_gradients(
    config: Config, manifest: Manifest, weights: Weights, file: Path
) -> np.ndarray:
    """[N, K] float32, the gradient of each sample's loss; read from `file` if it exists."""
    if file.is_file():
        return np.load(file)

    def of_sample(weights: Weights, row: Any) -> jax.Array:
        batch = jax.tree.map(lambda part: part[None], row)
        loss = jax.grad(lambda params: loss_sums(config, params, weights, batch).minimised)
        return sketch(loss(weights.params))

    of_batch = jax.jit(jax.vmap(of_sample, in_axes=(None, 0)))
    found = np.zeros((len(manifest), SIZE), np.float32)
    for batch in batches_of_one_shape(config, manifest, ROWS):
        real = batch.weight > 0
        found[batch.sample[real]] = np.asarray(of_batch(weights, batch))[real]
    np.save(file, found)
    return found


def training_gradient(
    config: Config, manifest: Manifest, plan: Plan, weights: Weights, number: int
) -> np.ndarray:
    """[K] float32, the gradient of a planned step as training computes it."""
    mesh = one_device_mesh()
    spec = training_spec(config, config.run.given_steps)
    collation = collation_for(plan, manifest, config.model, conditions_for(config.model, manifest))
    ranks = frozenset(range(plan.topology.ranks))
    batches = Collator(StoreReader(manifest), ranks, collation, plan.group_ranks)(
        plan.step(number)
    ).batches
    accumulate = make_accumulate(spec, mesh)
    sums = zero_accumulator(spec, mesh, weights, batches[0])
    key = jax.random.key_data(jax.random.key(NOISE_SEED))
    for batch in batches:
        sums = accumulate(weights, sums, jax.device_put(batch), key)
    return np.asarray(sketch(sums.grads) / sums.weight)


# ------------------------------------------------------------------ policies


def planned(config: Config, manifest: Manifest, ranks: int, policy: str, mode: str) -> Plan:
    """The plan of a policy for `ranks` ranks."""
    flags = ["--planning.policy", policy, "--planning.ranks_mode", mode]
    planning = read_config(["--config", str(CONFIG), *flags]).planning
    return make_plan(planning, manifest.samples(config.model.patch_size), ranks, config.run.seed)


def steps_of_epoch(plan: Plan, number: int) -> tuple[np.ndarray, np.ndarray]:
    """[P] samples of an epoch, and [P] the step of each; see `Draw`."""
    epoch = plan.epoch(number)
    step = np.repeat(epoch.step, np.diff(epoch.offsets))
    return epoch.sample, np.unique(step, return_inverse=True)[1]


def iid_steps(samples: int, per_step: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of `per_step` samples drawn i.i.d., as many as an epoch has; see `Draw`."""
    steps = samples // per_step
    rng = np.random.default_rng([NOISE_SEED, number])
    drawn = rng.integers(samples, size=steps * per_step)
    return drawn, np.repeat(np.arange(steps), per_step)


def compare(
    config: Config,
    manifest: Manifest,
    weights: Weights,
    gradients: np.ndarray,
    ranks: list[int],
    epochs: int,
) -> list[dict[str, Any]]:
    """Figures of all policies on each number of ranks, and of i.i.d. samples."""
    seq_len = manifest.samples(config.model.patch_size).seq_len
    populations = {
        "sample": Population(gradients, np.ones(len(seq_len))),
        "token": Population(gradients, seq_len.astype(np.float64)),
    }
    found = []
    for count in ranks:
        plans = {case: planned(config, manifest, count, *case) for case in CASES}
        per_step = round(float(np.bincount(steps_of_epoch(plans[CASES[0]], 0)[1]).mean()))
        draws: dict[tuple[str, str | None], Draw] = {
            case: partial(steps_of_epoch, plan) for case, plan in plans.items()
        }
        draws[IID, None] = partial(iid_steps, len(seq_len), per_step)
        for weighting, population in populations.items():
            for (policy, mode), draw in draws.items():
                case = {"ranks": count, "weighting": weighting, "policy": policy, "mode": mode}
                found.append(case | figures(population, seq_len, draw, epochs))
        if count == max(ranks):
            for row, plan in zip(found[-2 * len(draws) :], plans.values(), strict=False):
                row |= step_error(populations["sample"], config, manifest, plan, weights)
    return found


def step_error(
    population: Population, config: Config, manifest: Manifest, plan: Plan, weights: Weights
) -> dict[str, float]:
    """Relative error of the first step's gradient against the mean of its samples' gradients."""
    sample, step = steps_of_epoch(plan, 0)
    expected = population.gradients[sample[step == 0]].mean(axis=0)
    trained = training_gradient(config, manifest, plan, weights, 0)
    error = np.linalg.norm(trained - expected) / np.linalg.norm(expected)
    return {"error_against_training_step": float(error)}


def figures(population: Population, seq_len: np.ndarray, draw: Draw, epochs: int) -> dict[str, Any]:
    """Figures of `epochs` epochs: each [mean, half-width of its 95 % interval]."""
    drawn = [draw(number) for number in range(epochs)]
    each = [epoch_figures(population, *steps) for steps in drawn]
    mean_steps = np.stack([np.asarray(one.pop("mean_step")) for one in each])
    weight = np.concatenate([relative_weights(population.weight, *steps) for steps in drawn])
    length = seq_len[np.concatenate([sample for sample, _ in drawn])]
    by_length = {int(n): float(weight[length == n].mean()) for n in np.unique(length)}
    return {
        "epochs": epochs,
        "all_steps": int(sum(float(one["steps"]) for one in each)),
        **{name: interval([float(one[name]) for one in each]) for name in each[0]},
        "bias": bias(population, mean_steps),
        "weight_by_length": by_length,
        "weight_length_correlation": float(np.corrcoef(weight, length)[0, 1])
        if np.ptp(weight)
        else 0.0,
        "weight_longest_over_shortest": by_length[max(by_length)] / by_length[min(by_length)],
        "variance_between_lengths": population.share_between(seq_len),
    }


def table(found: list[dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    names = ("variance_at_mean", "variance_times_samples", "variance", "noise", "cosine")
    lines = [
        "| weights of step | ranks | mean over | policy | samples of a step "
        f"| {' | '.join(names)} | bias | weight, longest / shortest |",
        f"|---:|---:|---|---|---:|{'---:|' * len(names)}---:|---:|",
    ]
    for row in found:
        cells = [
            *(str(row[name]) for name in ("weights_of_step", "ranks", "weighting", "policy")),
            f"{row['samples'][0]:.0f} ({row['fewest'][0]:.2f} to {row['most'][0]:.2f}×)",
            *(f"{row[name][0]:.2f} ± {row[name][1]:.2f}" for name in names),
            f"{row['bias']:.2f}",
            f"{row['weight_longest_over_shortest']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
