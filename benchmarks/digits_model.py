"""Runs of benchmarks/digits_study.yaml: their config, weights, samples and gradients."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from alload_jax.config import Config, read_config
from alload_jax.data.batch import AnyBatch
from alload_jax.data.collate import BucketedCollation, Collator, collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.datasets import prepare_dataset
from alload_jax.data.manifest import Manifest, read_manifest
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError
from alload_jax.models.families import abstract_model
from alload_jax.objectives import LossSums
from alload_jax.planning.epoch import MicroBatch
from alload_jax.planning.factory import make_plan
from alload_jax.planning.plan import Plan
from alload_jax.sharding.mesh import batch_sharding
from alload_jax.training.restore import find_step, one_device_mesh, restore_weights
from alload_jax.training.state import Weights, training_spec
from alload_jax.training.step import make_accumulate, zero_accumulator

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "benchmarks" / "digits_study.yaml"
RESULTS = ROOT / "benchmarks" / "results"
NOISE_SEED = 20_000
"""Seed of noise and noise levels; no run trains with it, and every measurement uses it."""


def digits_config(*flags: str) -> Config:
    """The config of a run; prepares its data if they are missing."""
    config = read_config(["--config", str(CONFIG), *flags])
    assert config.data.dataset is not None
    prepare_dataset(config.data.folder, config.data.dataset)
    return config


def plan_of(config: Config, ranks: int = 1) -> Plan:
    """The plan of a run."""
    samples = read_manifest(config.data.folder).samples(config.model.patch_size)
    return make_plan(config.planning, samples, ranks, config.run.seed)


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


def step_gradient(config: Config, plan: Plan, weights: Weights, number: int, seed: int) -> Any:
    """The mean gradient of a planned step as training computes it; `seed` is of its noise."""
    mesh = one_device_mesh()
    parts = (config.model, config.optimizer, config.objective, config.parameters)
    spec = training_spec(*parts, config.run.given_steps)
    manifest = read_manifest(config.data.folder)
    collation = collation_for(plan, manifest, config.model, conditions_for(config.model, manifest))
    ranks = frozenset(range(plan.topology.ranks))
    collator = Collator(StoreReader(manifest), ranks, collation, plan.group_ranks)
    batches = collator(plan.step(number)).batches
    accumulate: Any = make_accumulate(spec, mesh)
    sums = zero_accumulator(spec, mesh, weights, batches[0])
    key = jax.random.key_data(jax.random.key(seed))
    for batch in batches:
        sums = accumulate(weights, sums, jax.device_put(batch), key)
    return jax.tree.map(lambda grad: grad / sums.weight, sums.grads)


def weights_of_run(config: Config, folder: Path, kind: Any, step: int | None = None) -> Weights:
    """The weights of a checkpoint of a run folder, on this process's first device.

    Args:
      config: config of the run.
      folder: folder of the run.
      kind: `ema` or `raw`.
      step: step of the checkpoint; None for the newest.
    """
    checkpoints = folder / "checkpoints"
    found = find_step(checkpoints, step)
    mesh = one_device_mesh()
    return restore_weights(checkpoints, found, config.model, config.parameters, mesh, kind)


def batches_of_one_shape(
    config: Config, manifest: Manifest, rows: int
) -> Iterator[AnyBatch[np.ndarray]]:
    """Yields every sample once, in batches of `rows` rows of one shape; the last are padded."""
    collation = BucketedCollation(manifest, conditions_for(config.model, manifest))
    reader = StoreReader(manifest)
    shapes, kind = np.unique(manifest.shape, axis=0, return_inverse=True)
    for number, shape in enumerate(shapes.tolist()):
        members = np.flatnonzero(kind.ravel() == number).tolist()
        for begin in range(0, len(members), rows):
            chosen = tuple(members[begin : begin + rows])
            part = MicroBatch(0, 0, rows, 0, (shape[0], shape[1], shape[2]), chosen)
            batch = collation.empty([part], epoch=0)
            for sample, row in collation.places([part]):
                arrays = reader.read(sample)
                collation.put(batch, row, sample, arrays, collation.conditions.of(arrays))
            yield batch


def loss_sums(config: Config, params: Any, weights: Weights, batch: AnyBatch) -> LossSums:
    """The objective's sums for a batch, with the trained parameters `params`; differentiable."""
    graph = abstract_model(config.model).graph
    model = nnx.merge(graph, weights._replace(params=params).merged())
    key = jax.random.key(NOISE_SEED)
    return config.objective(model, batch, key, batch_sharding(one_device_mesh()))


def loss_by_length(config: Config, manifest: Manifest, weights: Weights) -> dict[int, list[float]]:
    """Seq_len → [samples, mean loss] over all samples with the same noise in every call."""
    sums = jax.jit(lambda weights, batch: loss_sums(config, weights.params, weights, batch))
    seq_len = manifest.samples(config.model.patch_size).seq_len
    found: dict[int, np.ndarray] = {}
    for batch in batches_of_one_shape(config, manifest, 64):
        result = sums(weights, batch)
        length = int(seq_len[batch.sample[0]])
        added = np.asarray([result.weight, result.loss], np.float64)
        found[length] = found.get(length, np.zeros(2)) + added
    return {length: [n, loss / n] for length, (n, loss) in sorted(found.items())}
