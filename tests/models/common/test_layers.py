"""How layers are run as a loop."""

import jax
import pytest

from alload_jax.bench.step import random_batch, training_spec
from alload_jax.models.families import config_from_fields
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.state import abstract_state
from alload_jax.training.step import make_accumulate, zero_accumulator

TINY = {"dim": 8, "ffn_dim": 16, "num_heads": 2, "num_layers": 4, "in_channels": 4}


@pytest.mark.parametrize(
    ("policies", "barriers"),
    [(["full"], 0), (["attention", "full"], 2), (["full", "attention", "full", "attention"], 4)],
)
def test_layers_of_an_iteration_are_computed_again_in_turn(policies, barriers):
    spec = training_spec(config_from_fields(TINY | {"remat": "none", "remat_layers": policies}))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    weights = abstract_state(spec, mesh, 0).weights
    batch = jax.eval_shape(lambda: random_batch(spec.model, (1, 1, 4, 4), 1))
    sums = jax.eval_shape(lambda: zero_accumulator(spec, mesh, weights, batch, single=True))
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    text = make_accumulate(spec, mesh, single=True).lower(weights, sums, batch, key).as_text()
    of_timesteps = 1
    assert text.count("stablehlo.optimization_barrier") == of_timesteps + barriers
