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
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from digits_model import (
    NOISE_SEED,
    RESULTS,
    ROOT,
    batches_of_one_shape,
    digits_config,
    loss_sums,
    plan_of,
    step_gradient,
    train,
    weights_of_run,
)
from gradient_statistics import (
    Population,
    bias,
    epoch_figures,
    interval,
    relative_weights,
)

from alload_jax.bench.harness import Record, markdown
from alload_jax.config import Config, use_compilation_cache
from alload_jax.data.manifest import Manifest, read_manifest
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.planning.plan import Plan
from alload_jax.training.state import Weights

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
    config = digits_config()
    use_compilation_cache(config.run)
    every = str(np.gcd.reduce(options.steps))
    flags = ["--run.steps", str(max(options.steps)), "--planning.policy", "dual_constraint"]
    flags += ["--checkpoint.every", every, "--checkpoint.keep_every", every, "--evaluators", "[]"]
    train(options.folder, *flags)
    manifest = read_manifest(config.data.folder)
    found = []
    for number in options.steps:
        weights = weights_of_run(config, options.folder, "raw", number)
        gradients = sample_gradients(config, manifest, weights, options.folder / f"{number}.npy")
        rows = compare(config, manifest, weights, gradients, options.ranks, options.epochs)
        found += [{"weights_of_step": number} | row for row in rows]
    Record(
        RESULTS / f"gradient_variance_{options.device}.json",
        ["jax", "flax", "numpy", "scipy"],
        samples=len(manifest),
        numbers_per_gradient=SIZE,
        interval="[mean, half-width of the 95 % interval over epochs]",
        cases=found,
    ).write()
    print(table(found))
    return 0


# ------------------------------------------------------------------ gradients


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


# ------------------------------------------------------------------ policies


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
) -> list[Json]:
    """Figures of all policies on each number of ranks, and of i.i.d. samples."""
    seq_len = manifest.samples(config.model.patch_size).seq_len
    populations = {
        "sample": Population(gradients, np.ones(len(seq_len))),
        "token": Population(gradients, seq_len.astype(np.float64)),
    }
    found = []
    for count in ranks:
        plans = {
            (policy, mode): plan_of(
                digits_config("--planning.policy", policy, "--planning.ranks_mode", mode), count
            )
            for policy, mode in CASES
        }
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
                row |= step_error(populations["sample"], config, plan, weights)
    return found


def step_error(
    population: Population, config: Config, plan: Plan, weights: Weights
) -> dict[str, float]:
    """Relative error of the first step's gradient against the mean of its samples' gradients."""
    sample, step = steps_of_epoch(plan, 0)
    expected = population.gradients[sample[step == 0]].mean(axis=0)
    trained = np.asarray(sketch(step_gradient(config, plan, weights, 0, NOISE_SEED)))
    error = np.linalg.norm(trained - expected) / np.linalg.norm(expected)
    return {"error_against_training_step": float(error)}


def figures(population: Population, seq_len: np.ndarray, draw: Draw, epochs: int) -> Json:
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


def table(found: list[Json]) -> str:
    """The figures as a Markdown table."""
    names = ("variance_at_mean", "variance_times_samples", "variance", "noise", "cosine")
    words = ("weights_of_step", "ranks", "weighting", "policy")
    rows = [
        [
            *(row[name] for name in words),
            f"{row['samples'][0]:.0f} ({row['fewest'][0]:.2f} to {row['most'][0]:.2f}×)",
            *(f"{row[name][0]:.2f} ± {row[name][1]:.2f}" for name in names),
            f"{row['bias']:.2f}",
            f"{row['weight_longest_over_shortest']:.1f}",
        ]
        for row in found
    ]
    last = ("bias", "weight, longest / shortest")
    return markdown((*words, "samples of a step", *names, *last), rows, left=4)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
