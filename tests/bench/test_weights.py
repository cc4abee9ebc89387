"""Weights for benchmarks: no parameter is all zero, and others keep their values."""

import jax
import numpy as np
import pytest

from alload_jax.bench.harness import MODELS, training_fields
from alload_jax.models.families import config_from_fields
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.state import init_state
from alload_jax.training.trial_step import training_spec, without_zeros


@pytest.mark.slow
def test_only_zero_parameters_are_drawn_and_all_keep_their_sharding():
    spec = training_spec(config_from_fields(training_fields(MODELS["tiny"])))
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    fresh = jax.tree.map(np.asarray, init_state(spec, mesh, 0).params)
    state = init_state(spec, mesh, 0)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    drawn = without_zeros(state).params
    assert not fresh["head"]["out"]["kernel"].any()
    for before, after, sharding in zip(
        *map(jax.tree.leaves, (fresh, drawn, shardings)), strict=True
    ):
        assert after.sharding == sharding
        after = np.asarray(after)
        assert after.any()
        if before.any():
            np.testing.assert_array_equal(before, after)
