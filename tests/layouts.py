"""The same samples in packed, bucketed and single rows: their micro-batches and gradients."""

import dataclasses
from functools import cache
from operator import mul

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alload_jax.data.batch import signature
from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import conditions_for, samples_for
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.diffusion.timesteps import TimestepConfig
from alload_jax.models.families import abstract_model
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives import FlowMatching
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import TrainingSpec, Weights, init_state, weights_shardings
from alload_jax.training.step import accumulator_shardings, make_accumulate, zero_accumulator

SMALL = {"dim": 16, "ffn_dim": 24, "num_heads": 2, "patch_size": (1, 2, 2), "dtype": "float32"}
CLASSES = WanConfig(**SMALL, num_layers=1, freq_dim=8, in_channels=2)
OBJECTIVE = FlowMatching(timesteps=TimestepConfig(shift_power=0.5), condition_dropout=0.3)
JOINT_OBJECTIVE = FlowMatching(condition_dropout=0.3)
SIZES = [(1, 4, 4), (3, 4, 6)]
needs_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
MERGED = {"max_programs": 1}
"""Shapes share a bucket, whose rows are padded."""


def mesh_of(devices=1, **axes):
    return make_mesh(MeshConfig(**axes), jax.devices()[:devices])


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def write_samples(folder, count, sample, channels=2, scales=(), stride=(1, 1, 1), **options):
    """A data folder; `sample(rng, n)` returns the n-th one's size in latents, condition and more.

    Latents of the numbers in `scales` are multiplied.
    """
    rng, scales = np.random.default_rng(0), dict(scales)
    with StoreWriter(folder, vae_stride=stride, **options) as writer:
        for n in range(count):
            (frames, *area), condition, more = sample(rng, n)
            latents = normal(rng, frames, *area, channels) * np.float32(scales.get(n, 1.0))
            size = (1 + (frames - 1) * stride[0], *map(mul, area, stride[1:]))
            writer.add(latents, condition, size, **more)
    return read_manifest(folder)


def write_sizes(folder, sizes, labels):
    """Samples of each size (latent frames, height, width) → how many; `labels` of the n-th."""
    each = [(size, n) for size, count in sizes.items() for n in range(count)]

    def sample(rng, number):
        size, n = each[number]
        return size, rng.integers(0, 10, labels(n)).astype(np.int32), {}

    return write_samples(folder, len(each), sample)


def plan_of(manifest, model, policy, ranks=1, weight=None, **options):
    """A plan, and what collates its steps."""
    usual = {"m_mem": 108 if model.joint_attention else 80}
    usual |= {"rows": 1} if policy == "fixed" else {}
    config = PlanningConfig(policy=policy, **usual | options)
    conditions = conditions_for(model, manifest)
    samples = samples_for(model, manifest, conditions, config.traits.packed)
    plan = make_plan(config, dataclasses.replace(samples, weight=weight), ranks, seed=1)
    return plan, collation_for(plan, manifest, model, conditions)


def batches_of(manifest, model, policy, ranks=1, **options):
    """Every micro-batch of the first epoch, in host memory."""
    plan, collation = plan_of(manifest, model, policy, ranks, **options)
    collate = Collator(StoreReader(manifest), frozenset(range(ranks)), collation)
    steps = (collate(plan.step(number)) for number in range(plan.steps_per_epoch))
    return [batch for step in steps for batch in step.batches]


def disturbed(params):
    """Gates and head of a new model are zero; those of a trained one are not."""

    def moved(leaf):
        noise = normal(np.random.default_rng(leaf.size), *leaf.shape)
        return jax.device_put(np.asarray(leaf) + noise / 10, leaf.sharding)

    return jax.tree.map(moved, params)


@cache
def spec_of(model, objective=None):
    config = OptimizerConfig(warmup_steps=0)
    objective = objective or (JOINT_OBJECTIVE if model.joint_attention else OBJECTIVE)
    return TrainingSpec(model, objective, make_optimizer(config, 100), config.ema_decay)


@cache
def accumulate_of(model, mesh, objective=None):
    return make_accumulate(spec_of(model, objective), mesh)


@cache
def begun(model):
    return init_state(spec_of(model), mesh_of(), seed=0)


@cache
def weights_of(model):
    """Those of a trained model; drawn in NumPy where gates and refiners want larger ones."""
    if not model.joint_attention:
        return jax.tree.map(np.asarray, disturbed(begun(model).params))
    leaves, tree = jax.tree.flatten(abstract_model(model).params)
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [0.3 * normal(rng, *leaf.shape) for leaf in leaves])


ZEROS = {}
"""The sums before the first batch by model, for which a step is traced."""


def mean_gradient(model, mesh, batches, objective=None, weights=None, auxiliary=False):
    """The mean loss and gradients of micro-batches; and auxiliary values, if wanted."""
    return gradient_and_programs(model, mesh, batches, objective, weights)[0][: 2 + auxiliary]


def gradient_and_programs(model, mesh, batches, objective=None, weights=None):
    """Also the programs that compute it, one for each signature."""
    accumulate = accumulate_of(model, mesh, objective)
    weights = weights or Weights(weights_of(model), {}, {})
    weights = jax.device_put(weights, weights_shardings(weights, mesh, spec_of(model).rules))
    key = jax.random.key_data(jax.random.key(0))
    spec = spec_of(model)
    if model not in ZEROS:
        ZEROS[model] = jax.device_get(zero_accumulator(spec, mesh, weights, batches[0]))
    sums = jax.device_put(ZEROS[model], accumulator_shardings(ZEROS[model], spec, mesh))
    programs = {}
    for batch in jax.device_put(batches, batch_sharding(mesh)):
        kind = signature(batch)
        if kind not in programs:
            programs[kind] = accumulate.lower(weights, sums, batch, key).compile()
        sums = programs[kind](weights, sums, batch, key)
    sums = jax.device_get(sums)  # whose leaves would be divided by a program each
    found = jax.tree.map(lambda x: x / sums.weight, (sums.loss, sums.grads, sums.auxiliary))
    return found, list(programs.values())


def assert_same(found, expected, least=0.0):
    """Gradients without any but rounding are compared at `least` of the largest one."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    leaves = [jax.tree.leaves(each[1]) for each in (found, expected)]
    sizes = [np.linalg.norm(np.asarray(leaf, np.float64)) for leaf in leaves[1]]
    assert min(sizes) > 0 or least
    for ours, theirs, size in zip(*leaves, sizes, strict=True):
        away = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
        assert away <= 1e-5 * max(size, least * max(sizes))


def assert_gathers_no_activations(programs, tokens):
    """Of activations no rank gets those of another but by the exchange of heads."""
    for line in "\n".join(program.as_text() for program in programs).splitlines():
        if "all-gather(" in line:
            assert not any(f"{sep}{tokens}," in line.split("all-gather(")[0] for sep in ",[")


def velocities(model, batch, context=1):
    """The velocity of every sample of packed rows, by its number; parts of split ones together."""
    sharding = batch_sharding(mesh_of(context, context=context))
    graph, params = abstract_model(model).graph, weights_of(model)

    @jax.jit
    def run(batch):
        module = nnx.merge(graph, params)
        timestep = jnp.where(batch.sample >= 0, 100.0 + batch.sample, 0.0)
        tokens = batch.tokens
        if batch.given is not None:
            parts = (x.reshape(*x.shape[:2], 4, -1) for x in (tokens, batch.given))
            tokens = jnp.concatenate(list(parts), axis=-1).reshape(*tokens.shape[:2], -1)
        inputs = (tokens, batch.position, batch.metadata, timestep, batch.condition)
        return module.forward_packed(*inputs, sharding=sharding).velocity

    found = np.asarray(run(jax.device_put(batch, sharding)))
    offset, length, _ = batch.metadata.tokens
    parts = {}
    for row, slot in zip(*np.nonzero(length), strict=True):
        here = slice(offset[row, slot], offset[row, slot] + length[row, slot])
        sides = (batch.frame_tokens[row, slot], batch.line_tokens[row, slot], 1)
        part = (batch.position[row, here] @ sides, found[row, here])
        parts.setdefault(int(batch.sample[row, slot]), []).append(part)
    joined = {n: map(np.concatenate, zip(*each, strict=True)) for n, each in parts.items()}
    return {sample: values[np.argsort(place)] for sample, (place, values) in joined.items()}


def assert_reaches_no_other(model, batch, context=1):
    """A sample's values, finite or not, change no bit of its neighbours in packed rows."""
    before = velocities(model, batch, context)
    assert len(before) > 1
    spoilt = int(np.bincount(batch.sample[batch.sample >= 0]).argmax())
    for value in (7.0, np.nan):
        changed = jax.tree.map(np.copy, batch)
        for row, slot in zip(*np.nonzero(batch.sample == spoilt), strict=True):
            changed.tokens[row, batch.metadata.tokens.ids[row] == slot] = value
            if model.text:
                for tokens in changed.condition.values():
                    tokens.values[row, tokens.segments.ids[row] == slot] = value
        after = velocities(model, changed, context)
        for sample, expected in before.items():
            if sample == spoilt:
                assert np.isnan(after[sample]).all() == np.isnan(value)
                assert not np.array_equal(after[sample], expected)
            else:
                np.testing.assert_array_equal(after[sample], expected)
