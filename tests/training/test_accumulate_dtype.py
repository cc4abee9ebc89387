"""Gradients are summed over micro-batches in float32, or in bfloat16 within its rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group_cases import MODEL, SIZES, SPEC, collation_of, plan_for, steps_on, write_data

from alload_jax.data.batch import Batch
from alload_jax.data.manifest import read_manifest
from alload_jax.sharding.mesh import MeshConfig, group_meshes, make_mesh
from alload_jax.training.state import init_state
from alload_jax.training.step import make_accumulate, make_update, zero_accumulator
from alload_jax.training.trainer import make_trainer

HALF = SPEC._replace(accumulate_dtype="bfloat16")
ROUNDING = 2.0**-8  # of bfloat16, relative to the value
COUNT = 4


def batch_of(number):
    rng = np.random.default_rng(number)
    return Batch(
        jnp.asarray(rng.normal(size=(2, *SIZES[0], 1)), jnp.float32),
        jnp.asarray(rng.integers(0, 10, (2, 2)), jnp.int32),
        jnp.arange(2, dtype=jnp.int32) + 2 * number,
        jnp.zeros(2, jnp.int32),
        jnp.ones(2, jnp.float32),
    )


def sums_of(spec, mesh, state, count):
    accumulate = make_accumulate(spec, mesh)
    sums, after = zero_accumulator(spec, mesh, state.weights, batch_of(0)), []
    for number in range(count):
        sums = accumulate(state.weights, sums, batch_of(number), state.key)
        after.append(jax.tree.map(lambda g: np.asarray(g, np.float64), sums.grads))
    return sums, after


@pytest.mark.slow
def test_a_sum_in_bfloat16_is_rounded_once_for_each_micro_batch():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = init_state(SPEC, mesh, seed=0)
    half, rounded = sums_of(HALF, mesh, state, COUNT)
    full, exact = sums_of(SPEC, mesh, state, COUNT)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.grads)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(full.grads)} == {jnp.dtype("float32")}
    assert (half.loss, half.weight) == (full.loss, full.weight)
    for number, (ours, theirs) in enumerate(zip(rounded, exact, strict=True), 1):
        sizes = [jax.tree.map(np.abs, one) for one in exact[:number]]
        allowed = jax.tree.map(lambda *parts: 1.1 * ROUNDING * sum(parts), *sizes)
        jax.tree.map(
            lambda a, b, bound: np.testing.assert_array_less(np.abs(a - b), bound + 1e-12),
            ours,
            theirs,
            allowed,
        )
    update = make_update(HALF, mesh)
    after, zeroed, metrics = update(state, half)
    assert {leaf.dtype for leaf in jax.tree.leaves(zeroed.grads)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(exact[-1]))) / float(full.weight)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=0.01)


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs 4 CPU devices")
def test_shape_groups_sum_in_bfloat16_too(tmp_path):
    write_data(tmp_path / "data")
    manifest = read_manifest(tmp_path / "data")
    mesh = make_mesh(MeshConfig(), jax.devices()[:4])
    plan = plan_for(manifest, 4)
    placed = steps_on(manifest, plan, mesh, 3)
    found = []
    for spec in (SPEC, HALF):
        trainer = make_trainer(spec, mesh, init_state(spec, mesh, 0), group_meshes(mesh, plan))
        list(trainer.compile(collation_of(manifest, plan).shapes(plan)))
        found.append([float(trainer.step(step)["grad_norm"]) for step in placed])
    assert MODEL.dtype == "float32"
    np.testing.assert_allclose(found[0], found[1], rtol=0.02)
    assert found[0] != found[1]
