"""The gradient is that of the weighted mean loss, however samples are grouped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alload_jax.data.batch import Batch
from alload_jax.diffusion.timesteps import TimestepConfig
from alload_jax.errors import InputError
from alload_jax.models.families import gradient_dtypes
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives.flow_matching import FlowMatching, noised
from alload_jax.sharding.mesh import MeshConfig, make_mesh, path_name
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import TrainingSpec, Weights, init_state
from alload_jax.training.step import (
    make_accumulate,
    make_is_finite,
    make_update,
    zero_accumulator,
)

MODEL = WanConfig(dim=16, ffn_dim=24, num_heads=2, num_layers=2, freq_dim=8, dtype="float32")
OBJECTIVE = FlowMatching(timesteps=TimestepConfig(shift_power=0.5), condition_dropout=0.3)
OPTIMIZER = OptimizerConfig(warmup_steps=0)
SIZES = [(1, 4, 4), (1, 4, 4), (3, 4, 2), (1, 4, 4), (3, 4, 2), (1, 4, 4), (1, 4, 4)]


def spec_with(config=OPTIMIZER):
    return TrainingSpec(MODEL, OBJECTIVE, make_optimizer(config, 10), config.ema_decay)


def disturbed(params):
    return jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params
    )


@pytest.fixture(scope="module")
def setup():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = init_state(spec_with(), mesh, seed=0)
    # Gates and head of a new model are zero; those of a trained one are not.
    params = jax.jit(disturbed)(state.params)
    return mesh, Weights(params, {}, {}), state.key, make_accumulate(spec_with(), mesh)


def batch_of(samples, rows=None, epoch=0):
    """The samples as a micro-batch, padded to `rows`."""
    rows = rows or len(samples)
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


def mean_gradient(setup, batches):
    mesh, weights, key, accumulate = setup
    sums = zero_accumulator(spec_with(), mesh, weights, batches[0])
    for batch in batches:
        sums = accumulate(weights, sums, batch, key)
    return float(sums.loss / sums.weight), jax.tree.map(lambda g: g / sums.weight, sums.grads)


GROUPINGS = [
    [([0, 1, 3, 5, 6], None), ([2, 4], None)],
    [([6, 0], 4), ([4], 3), ([5, 3, 1], 4), ([2], 1)],
]


@pytest.mark.slow
@pytest.mark.parametrize("grouping", GROUPINGS[1:])
def test_the_gradient_does_not_depend_on_grouping(setup, grouping):
    loss, gradient = mean_gradient(setup, [batch_of(*part) for part in GROUPINGS[0]])
    other_loss, other = mean_gradient(setup, [batch_of(*part) for part in grouping])
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(ours)
        assert np.linalg.norm(ours) > 0


def test_the_loss_is_the_weighted_mean_of_the_samples_losses(setup):
    together, _ = mean_gradient(setup, [batch_of(*part) for part in GROUPINGS[0]])
    alone = [mean_gradient(setup, [batch_of([n])])[0] for n in range(7)]
    weights = [1.0 + n / 10 for n in range(7)]
    np.testing.assert_allclose(together, np.average(alone, weights=weights), rtol=1e-5)


def test_divided_by_the_mean_weight_of_steps_every_sample_moves_the_weights_alike(setup):
    """With plain gradient descent from the same weights, however samples are cut into steps."""
    mesh, weights, _, accumulate = setup
    total = sum(1.0 + n / 10 for n in range(7))

    def gradient(steps, by_plan):
        """The sum over all steps, of whose mean weight each is taken to be."""
        mean_weight = total / len(steps)
        spec = spec_with()._replace(
            optimizer=optax.sgd(1.0), step_weight=mean_weight if by_plan else None
        )
        update, found = make_update(spec, mesh), []
        for parts in steps:
            state = init_state(spec, mesh, seed=0)
            state = state._replace(params=jax.tree.map(jnp.copy, weights.params))
            sums = zero_accumulator(spec, mesh, state.weights, batch_of(parts[0]))
            for part in parts:
                sums = accumulate(state.weights, sums, batch_of(part), setup[2])
            after = update(state, sums)[0].params
            found.append(jax.tree.map(np.subtract, weights.params, after))
        return jax.tree.map(lambda *moves: np.sum(moves, axis=0) * mean_weight, *found)

    uneven, whole = [[[0, 1], [2]], [[3, 5, 6]], [[4]]], [[[0, 1, 3, 5, 6], [2, 4]]]
    found, by_step, expected = (
        gradient(uneven, True),
        gradient(uneven, False),
        gradient(whole, True),
    )
    other = []
    for ours, theirs, exact in zip(*map(jax.tree.leaves, (found, by_step, expected)), strict=True):
        size = np.linalg.norm(exact)
        assert np.linalg.norm(ours - exact) <= 1e-3 * size
        other.append(np.linalg.norm(theirs - exact) / size)
    assert np.median(other) > 0.05  # a step's own weight gives short steps more


def test_padding_adds_nothing_even_where_it_is_not_zero(setup):
    batch = batch_of([0, 1], 4)
    loud = batch._replace(latents=batch.latents.at[2:].set(1e3))
    _, quiet = mean_gradient(setup, [batch])
    _, same = mean_gradient(setup, [loud])
    jax.tree.map(np.testing.assert_array_equal, quiet, same)


def test_noise_belongs_to_the_sample_and_the_epoch(setup):
    key = jax.random.wrap_key_data(setup[2])
    first = noised(batch_of([0, 1, 3]), key, OBJECTIVE, MODEL)
    moved = noised(batch_of([3, 0], 5), key, OBJECTIVE, MODEL)
    for ours, theirs in zip(first, moved, strict=True):
        np.testing.assert_array_equal(ours[2], theirs[0])
        np.testing.assert_array_equal(ours[0], theirs[1])
    later = noised(batch_of([0, 1, 3], epoch=1), key, OBJECTIVE, MODEL)
    assert not np.allclose(first[0], later[0])


def test_the_condition_is_dropped_at_the_configured_rate(setup):
    rows = 2000
    batch = Batch(
        jnp.zeros((rows, 1, 2, 2, 1)),
        jnp.full((rows, 2), 4),
        jnp.arange(rows),
        jnp.zeros(rows, jnp.int32),
        jnp.ones(rows),
    )
    labels = np.asarray(noised(batch, jax.random.key(0), OBJECTIVE, MODEL)[3])
    dropped = (labels == MODEL.num_classes).all(1)
    assert (dropped == (labels == MODEL.num_classes).any(1)).all()
    assert abs(dropped.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / rows)


def test_an_update_is_adamw_by_hand(setup):
    """One parameter followed through clipping, AdamW, decay and EMA in NumPy."""
    mesh, _, _, accumulate = setup
    config = OptimizerConfig(learning_rate=0.01, warmup_steps=0, clip_norm=0.5, weight_decay=0.1)
    spec, batch = spec_with(config), batch_of([0, 1])
    state = init_state(spec, mesh, seed=0)
    update = make_update(spec, mesh)
    zero = zero_accumulator(spec, mesh, state.weights, batch)
    sums = accumulate(state.weights, zero, batch, state.key)
    grads = jax.tree.map(lambda g: np.asarray(g / sums.weight, np.float64), sums.grads)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    before = np.asarray(state.params["head"]["out"]["kernel"], np.float64)
    grad = grads["head"]["out"]["kernel"] * min(1, 0.5 / norm)
    after, zeroed, metrics = update(state, sums)
    step = grad / (np.sqrt(grad**2) + config.eps) + config.weight_decay * before
    expected = before - 0.01 * step
    np.testing.assert_allclose(after.params["head"]["out"]["kernel"], expected, rtol=1e-4)
    ema = before + (1 - 1 / 10) * (expected - before)
    np.testing.assert_allclose(after.ema["head"]["out"]["kernel"], ema, rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(zeroed))
    assert int(after.step) == 1


def test_only_matrices_decay(setup):
    from alload_jax.training.update_rules import decays

    _mesh, weights, *_ = setup
    marked = decays(weights.params)
    assert marked["blocks"]["self_attention"]["query"]["kernel"]
    assert not marked["blocks"]["self_attention"]["query"]["bias"]
    assert not marked["blocks"]["modulation"]
    assert not marked["condition_embedding"]["table"]["embedding"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learning_rate": 0.0}, "optimizer.learning_rate is 0.0"),
        ({"beta2": 1.0}, "optimizer.beta2 is 1.0"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps is -1"),
    ],
)
def test_invalid_settings_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        OptimizerConfig(**change)


def test_a_step_of_padding_changes_only_the_step_number(setup):
    mesh, weights, _, accumulate = setup
    spec = spec_with()
    state = init_state(spec, mesh, seed=0)._replace(params=weights.params)
    update = make_update(spec, mesh)
    before = jax.tree.map(np.asarray, (state.params, state.ema, state.opt_state))
    empty = batch_of([0, 1])._replace(weight=jnp.zeros(2))
    zero = zero_accumulator(spec, mesh, weights, empty)
    sums = accumulate(weights, zero, empty, state.key)
    copied = jax.tree.map(jnp.copy, state)
    after, _, metrics = update(copied, sums)
    jax.tree.map(np.testing.assert_array_equal, before, (after.params, after.ema, after.opt_state))
    assert int(after.step) == 1
    assert float(metrics["loss"]) == 0


@pytest.fixture(scope="module")
def alone(setup):
    """The programs of steps of one micro-batch."""
    mesh = setup[0]
    return make_accumulate(spec_with(), mesh, single=True), make_update(
        spec_with(), mesh, single=True
    )


def test_one_micro_batch_alone_gives_the_same_gradient_whatever_was_held_before(setup, alone):
    mesh, weights, key, accumulate = setup
    batch = batch_of([0, 1])
    zero = zero_accumulator(spec_with(), mesh, weights, batch)
    added = accumulate(weights, zero, batch, key)
    held = zero_accumulator(spec_with(), mesh, weights, batch)
    held = held._replace(grads=jax.tree.map(lambda g: g + jnp.nan, held.grads))
    written = alone[0](weights, held, batch, key)
    for one, other in zip(jax.tree.leaves(added), jax.tree.leaves(written), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("policies", [("full",), ("full", "attention")], ids="+".join)
def test_the_gradient_of_a_micro_batch_alone_takes_no_memory_of_its_own(setup, policies):
    """And layers keep no copy of their parameters."""
    mesh, batch = setup[0], batch_of([0])
    model = dataclasses.replace(MODEL, dim=128, ffn_dim=512, num_layers=6, remat_layers=policies)
    spec = spec_with()._replace(model=model)
    state = jax.eval_shape(lambda: init_state(spec, mesh, seed=0))
    sums = jax.eval_shape(lambda: zero_accumulator(spec, mesh, state.weights, batch))
    gradient = sum(leaf.size * 4 for leaf in jax.tree.leaves(sums.grads))

    def memory(single):
        program = make_accumulate(spec, mesh, single=single)
        compiled = program.lower(state.weights, sums, batch, state.key).compile()
        return compiled.memory_analysis()

    added, written = memory(False), memory(True)
    assert written.alias_size_in_bytes >= gradient
    assert written.temp_size_in_bytes < 0.6 * gradient
    assert added.temp_size_in_bytes > written.temp_size_in_bytes + 0.7 * gradient


@pytest.mark.parametrize("scan", [True, False], ids=["loop", "unrolled"])
def test_the_gradient_of_a_micro_batch_alone_stays_as_it_is_computed(setup, scan):
    """In bfloat16 for kernels of layers that compute so: half the bytes and, but for one rounding
    of XLA's own on CPUs, the same numbers."""
    mesh, batch = setup[0], batch_of([0, 1])
    model = dataclasses.replace(MODEL, dtype="bfloat16", scan_layers=scan)
    spec = spec_with()._replace(model=model)
    weights = init_state(spec, mesh, seed=0).weights
    weights = weights._replace(params=jax.jit(disturbed)(weights.params))
    found = []
    for single in (False, True):
        sums = zero_accumulator(spec, mesh, weights, batch, single=single)
        accumulate = make_accumulate(spec, mesh, single=single)
        found.append(accumulate(weights, sums, batch, setup[2]).grads)
    names = set(gradient_dtypes(model))

    def compare(path, wide, narrow):
        in_16_bits = path_name(path) in names
        assert wide.dtype == "float32"
        assert narrow.dtype == ("bfloat16" if in_16_bits else "float32")
        narrow = narrow.astype(jnp.float32)
        scale = float(jnp.max(jnp.abs(wide)))
        np.testing.assert_allclose(wide, narrow, rtol=2**-7, atol=2**-9 * scale)

    jax.tree_util.tree_map_with_path(compare, *found)
    assert len(names) == 10


def test_updates_of_micro_batches_alone_are_those_of_sums(setup, alone):
    mesh, _, _, accumulate = setup
    found = []
    for gradient, update in ((accumulate, make_update(spec_with(), mesh)), alone):
        state = init_state(spec_with(), mesh, seed=0)
        sums = zero_accumulator(spec_with(), mesh, state.weights, batch_of([0, 1]))
        for step in range(3):
            sums = gradient(state.weights, sums, batch_of([0, 1], epoch=step), state.key)
            state, sums, metrics = update(state, sums)
        found.append((state.params, metrics))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_after_a_step_that_is_not_finite_nothing_changes_until_it_is_cleared(setup, alone):
    mesh, _, _, _ = setup
    gradient, update = alone
    state = init_state(spec_with(), mesh, seed=0)
    before = jax.tree.map(np.asarray, state.params)
    good, bad = batch_of([0, 1]), batch_of([0, 1])
    bad = bad._replace(latents=bad.latents.at[0, 0, 0, 0].set(jnp.nan))
    sums = zero_accumulator(spec_with(), mesh, state.weights, good)
    for batch in (bad, good):
        state, sums, metrics = update(state, gradient(state.weights, sums, batch, state.key))
        assert not np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, before, state.params)
    _, sums = make_is_finite(spec_with(), mesh)(sums)
    state, _, metrics = update(state, gradient(state.weights, sums, good, state.key))
    assert np.isfinite(metrics["loss"])
    assert any(
        (np.asarray(a) != b).any()
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True)
    )
