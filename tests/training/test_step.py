"""The gradient is that of the weighted mean loss, however samples are grouped."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from group_cases import MODEL
from layouts import OBJECTIVE, disturbed, mesh_of

from alload_jax.data.batch import Batch
from alload_jax.models.common.config import TextConfig
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.families import build_model, gradient_dtypes, split_model
from alload_jax.objectives import noised
from alload_jax.sharding.mesh import path_name
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import TrainingSpec, init_state
from alload_jax.training.step import (
    _make_sums,
    make_accumulate,
    make_add_noise,
    make_is_finite,
    make_update,
    zero_accumulator,
)
from alload_jax.training.update_rules import decays

SIZES = [(1, 4, 4), (1, 4, 4), (3, 4, 2), (1, 4, 4), (3, 4, 2), (1, 4, 4), (1, 4, 4)]
ROWS = 5
"""Of every micro-batch, so that all tests share two programs."""


def spec_with(model=MODEL, **optimizer):
    config = OptimizerConfig(warmup_steps=0, **optimizer)
    return TrainingSpec(model, OBJECTIVE, make_optimizer(config, 10), config.ema_decay)


SPEC = spec_with()


@pytest.fixture(scope="module")
def made():
    """A state and the programs of steps of several micro-batches, and of one alone."""
    mesh = mesh_of()
    state = init_state(SPEC, mesh, seed=0)
    state = state._replace(params=disturbed(state.params))
    return SimpleNamespace(
        mesh=mesh,
        state=state,
        zeros=zero_accumulator(SPEC, mesh, state.weights, batch_of([0])),
        accumulate=make_accumulate(SPEC, mesh),
        update=make_update(SPEC, mesh),
        alone=(make_accumulate(SPEC, mesh, single=True), make_update(SPEC, mesh, single=True)),
    )


def fresh(tree):
    """A copy, which programs may take for themselves; not a program for each shape."""
    return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), leaf.sharding), tree)


def copy_of(made, spec=SPEC):
    state = fresh(made.state)
    if spec is SPEC:
        return state
    return state._replace(opt_state=fresh(spec.optimizer.init(state.params)))


def batch_of(samples, epoch=0, rows=ROWS):
    """The samples as a micro-batch, padded to `rows`."""
    size = SIZES[samples[0]]
    latents = np.zeros((rows, *size, 1), np.float32)
    labels = np.full((rows, 2), 10, np.int32)
    number = np.full(rows, -1, np.int32)
    weight = np.zeros(rows, np.float32)
    for row, sample in enumerate(samples):
        rng = np.random.default_rng(sample)
        latents[row], labels[row] = rng.normal(size=(*size, 1)), rng.integers(0, 10, 2)
        number[row], weight[row] = sample, 1.0 + sample / 10
    epochs = np.full(rows, epoch, np.int32)
    return Batch(*map(jnp.asarray, (latents, labels, number, epochs, weight)))


def sums_of(made, *batches):
    sums = fresh(made.zeros)
    for batch in batches:
        sums = made.accumulate(made.state.weights, sums, batch, made.state.key)
    return sums


def mean_of(sums):
    sums = jax.device_get(sums)
    return jax.tree.map(lambda part: part / sums.weight, (sums.loss, sums.grads))


def norm_of(tree):
    return np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(tree)))


TOGETHER = [[0, 1, 3, 5, 6], [2, 4]]


def test_loss_and_gradient_are_the_weighted_means_of_those_of_the_samples(made):
    found = mean_of(sums_of(made, *map(batch_of, TOGETHER)))
    alone = [mean_of(sums_of(made, batch_of([n]))) for n in range(7)]
    weights = [1.0 + n / 10 for n in range(7)]
    expected = jax.tree.map(lambda *each: np.average(each, axis=0, weights=weights), *alone)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for ours, theirs in zip(*(jax.tree.leaves(each[1]) for each in (found, expected)), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(ours)
        assert np.linalg.norm(ours) > 0


def test_divided_by_the_mean_weight_of_steps_every_sample_moves_the_weights_alike(made):
    """With plain gradient descent from the same weights, however samples are cut into steps."""
    total = sum(1.0 + n / 10 for n in range(7))

    def gradient(steps, by_plan):
        """The sum over all steps, of whose mean weight each is taken to be."""
        mean = total / len(steps)
        spec = SPEC._replace(optimizer=optax.sgd(1.0), step_weight=mean if by_plan else None)
        update, found = make_update(spec, made.mesh), []
        for parts in steps:
            sums = sums_of(made, *map(batch_of, parts))
            after = update(copy_of(made, spec), sums)[0].params
            found.append(jax.tree.map(np.subtract, made.state.params, after))
        return jax.tree.map(lambda *moves: np.sum(moves, axis=0) * mean, *found)

    uneven = [[[0, 1], [2]], [[3, 5, 6]], [[4]]]
    trees = gradient(uneven, True), gradient(uneven, False)
    whole, other = sums_of(made, *map(batch_of, TOGETHER)).grads, []
    for ours, theirs, exact in zip(*map(jax.tree.leaves, (*trees, whole)), strict=True):
        size = np.linalg.norm(exact)
        assert np.linalg.norm(ours - exact) <= 1e-3 * size
        other.append(np.linalg.norm(theirs - exact) / size)
    assert np.median(other) > 0.05  # a step's own weight gives short steps more


def test_padding_adds_nothing_even_where_it_is_not_zero(made):
    batch = batch_of([0, 1])
    loud = np.array(batch.latents)
    loud[2:] = 1e3
    loud = batch._replace(latents=jnp.asarray(loud))
    quiet, same = (mean_of(sums_of(made, each))[1] for each in (batch, loud))
    jax.tree.map(np.testing.assert_array_equal, quiet, same)


def test_noise_belongs_to_the_sample_and_the_epoch(made):
    """And its key is not that of the weights."""
    weights, key = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(made.state.key, jax.random.key_data(key))
    drawn = split_model(build_model(MODEL, nnx.Rngs(weights))).params
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), made.state.ema, drawn)
    first = noised(batch_of([0, 1, 3]), key, OBJECTIVE, MODEL)
    moved = noised(batch_of([3, 0]), key, OBJECTIVE, MODEL)
    for ours, theirs in zip(first, moved, strict=True):
        np.testing.assert_array_equal(ours[2], theirs[0])
        np.testing.assert_array_equal(ours[0], theirs[1])
    later = noised(batch_of([0, 1, 3], epoch=1), key, OBJECTIVE, MODEL)
    assert not np.allclose(first[0], later[0])


def test_dropout_differs_between_sets_of_samples_and_of_epochs(made):
    """Also where their numbers have equal sums."""
    lora = LoraConfig(1, dropout=0.5, targets=("feed_forward/hidden",))
    spec = spec_with(dataclasses.replace(MODEL, lora=lora))

    def key_of(model, *_):
        return SimpleNamespace(minimised=model.blocks.feed_forward.hidden.dropout_key[...])

    weights = init_state(spec, made.mesh, seed=0).weights
    sums = _make_sums(spec._replace(objective=key_of), made.mesh)
    drawn = jax.jit(lambda batch: sums(weights.params, weights, batch, made.state.key)[0])

    def key(samples, epoch=0):
        return tuple(drawn(batch_of(samples, epoch)).ravel().tolist())

    assert key([0, 6]) == key([6, 0])
    assert len({key([0, 6]), key([1, 5]), key([0, 1, 5]), key([0, 6], 1), key([5, 1], 1)}) == 5


def test_the_condition_is_dropped_at_the_configured_rate():
    rows = 2000
    latents, labels = jnp.zeros((rows, 1, 2, 2, 1)), jnp.full((rows, 2), 4)
    batch = Batch(latents, labels, jnp.arange(rows), jnp.zeros(rows, jnp.int32), jnp.ones(rows))
    key, with_text = jax.random.key(0), dataclasses.replace(MODEL, text=TextConfig(3, 2))
    labels = np.asarray(noised(batch, key, OBJECTIVE, MODEL)[3])
    dropped = (labels == MODEL.num_classes).all(1)
    assert (dropped == (labels == MODEL.num_classes).any(1)).all()
    assert abs(dropped.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / rows)
    text = noised(batch._replace(condition=jnp.ones((rows, 2, 3))), key, OBJECTIVE, with_text)[3]
    np.testing.assert_array_equal(text[:, 1, 2], ~dropped)


def test_an_update_is_adamw_by_hand(made):
    """One parameter followed through clipping, AdamW, decay and EMA in NumPy."""
    rates = {"learning_rate": 0.01, "clip_norm": 0.5, "weight_decay": 0.1, "skip_above": 5.0}
    spec, sums = spec_with(**rates), sums_of(made, batch_of([0, 1]))
    grads = mean_of(sums)[1]
    norm = norm_of(grads)
    before = np.asarray(made.state.params["head"]["out"]["kernel"], np.float64)
    ema = np.asarray(made.state.ema["head"]["out"]["kernel"], np.float64)
    grad = np.asarray(grads["head"]["out"]["kernel"], np.float64) * min(1, 0.5 / norm)
    after, zeroed, metrics = make_update(spec, made.mesh)(copy_of(made, spec), sums)
    assert metrics["update_skipped"] == 0
    step = grad / (np.abs(grad) + OptimizerConfig().eps) + 0.1 * before
    expected = before - 0.01 * step
    np.testing.assert_allclose(after.params["head"]["out"]["kernel"], expected, rtol=1e-4)
    ema += (1 - 1 / 10) * (expected - ema)
    np.testing.assert_allclose(after.ema["head"]["out"]["kernel"], ema, rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(zeroed))
    assert int(after.step) == 1


def test_only_matrices_decay(made):
    marked = decays(made.state.params)
    assert marked["blocks"]["self_attention"]["query"]["kernel"]
    assert not marked["blocks"]["self_attention"]["query"]["bias"]
    assert not marked["blocks"]["modulation"]
    assert not marked["condition_embedding"]["table"]["embedding"]


def test_a_step_of_padding_changes_only_the_step_number(made):
    state = copy_of(made)
    before = jax.tree.map(np.asarray, (made.state.params, made.state.ema, state.opt_state))
    sums = sums_of(made, batch_of([0, 1])._replace(weight=jnp.zeros(ROWS)))
    after, _, metrics = made.update(state, sums)
    jax.tree.map(np.testing.assert_array_equal, before, (after.params, after.ema, after.opt_state))
    assert int(after.step) == 1
    assert float(metrics["loss"]) == 0


def test_one_micro_batch_alone_gives_the_same_gradient_whatever_was_held_before(made):
    batch, zeros = batch_of([0, 1]), fresh(made.zeros)
    nans = [
        jax.device_put(np.full_like(g, np.nan), g.sharding) for g in jax.tree.leaves(zeros.grads)
    ]
    held = zeros._replace(grads=jax.tree.unflatten(jax.tree.structure(zeros.grads), nans))
    written = made.alone[0](made.state.weights, held, batch, made.state.key)
    for one, other in zip(*map(jax.tree.leaves, (sums_of(made, batch), written)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_gradient_of_a_micro_batch_alone_takes_no_memory_of_its_own(made):
    """And layers keep no copy of their parameters."""
    policies = ("full", "attention")
    batch = batch_of([0], rows=1)
    model = dataclasses.replace(MODEL, dim=128, ffn_dim=512, num_layers=6, remat_layers=policies)
    spec = SPEC._replace(model=model)
    state = jax.eval_shape(lambda: init_state(spec, made.mesh, seed=0))
    sums = jax.eval_shape(lambda: zero_accumulator(spec, made.mesh, state.weights, batch))
    gradient = sum(leaf.size * 4 for leaf in jax.tree.leaves(sums.grads))

    program = make_accumulate(spec, made.mesh, single=True)
    compiled = program.lower(state.weights, sums, batch, state.key).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= gradient
    assert memory.temp_size_in_bytes < 0.6 * gradient


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_gradient_of_a_micro_batch_alone_stays_as_it_is_computed(made, scan):
    """In bfloat16 for kernels of layers that compute so: half the bytes and, but for one rounding
    of XLA's own on CPUs, the same numbers."""
    batch = batch_of([0, 1])
    model = dataclasses.replace(MODEL, dtype="bfloat16", num_layers=1, scan_layers=scan)
    spec, found = SPEC._replace(model=model), []
    weights = init_state(spec, made.mesh, seed=0).weights
    weights = weights._replace(params=disturbed(weights.params))
    for single in (False, True):
        sums = zero_accumulator(spec, made.mesh, weights, batch, single=single)
        accumulate = make_accumulate(spec, made.mesh, single=single)
        found.append(accumulate(weights, sums, batch, made.state.key).grads)
    names = set(gradient_dtypes(model))

    def compare(path, wide, narrow):
        assert wide.dtype == "float32"
        assert narrow.dtype == ("bfloat16" if path_name(path) in names else "float32")
        narrow, scale = narrow.astype(jnp.float32), float(jnp.max(jnp.abs(wide)))
        np.testing.assert_allclose(wide, narrow, rtol=2**-7, atol=2**-9 * scale)

    jax.tree_util.tree_map_with_path(compare, *found)
    assert len(names) == 10


def test_updates_of_micro_batches_alone_are_those_of_sums(made):
    found = []
    for gradient, update in ((made.accumulate, made.update), made.alone):
        state, sums = copy_of(made), fresh(made.zeros)
        for step in range(3):
            sums = gradient(state.weights, sums, batch_of([0, 1], epoch=step), state.key)
            state, sums, metrics = update(state, sums)
        found.append((state.params, metrics))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_after_a_step_that_is_not_finite_nothing_changes_until_it_is_cleared(made):
    (gradient, update), state = made.alone, copy_of(made)
    good, bad = batch_of([0, 1]), batch_of([0, 1])
    bad = bad._replace(latents=bad.latents.at[0, 0, 0, 0].set(jnp.nan))
    sums = fresh(made.zeros)
    for batch in (bad, good):
        state, sums, metrics = update(state, gradient(state.weights, sums, batch, state.key))
        assert not np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, made.state.params, state.params)
    _, sums = make_is_finite(SPEC, made.mesh)(sums)
    state, _, metrics = update(state, gradient(state.weights, sums, good, state.key))
    assert np.isfinite(metrics["loss"])
    assert norm_of(jax.tree.map(np.subtract, state.params, made.state.params)) > 0


def test_the_noise_scale_is_what_steps_gradients_do_not_share(made):
    """By its definition: products of two steps are signal, and what squares have beyond, noise."""
    add, steps = make_add_noise(SPEC, made.mesh), [[0, 1, 3], [5, 6], [2, 4]]
    accumulators = [sums_of(made, batch_of(samples)) for samples in steps]
    grads = [np.concatenate([g.ravel() for g in jax.tree.leaves(mean_of(each)[1])]) for each in
             accumulators]  # fmt: skip
    products = np.float64(grads) @ np.float64(grads).T
    signal = products[~np.eye(3, dtype=bool)].mean()
    noise = np.diag(products).mean() - signal
    inverse = np.mean([1 / sum(1 + n / 10 for n in samples) for samples in steps])
    sums = None
    for each in accumulators:
        sums, zeroed = add(sums, each)
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(zeroed))
    np.testing.assert_allclose(sums.noise_scale(), noise / signal / inverse, rtol=1e-3)
