"""The size of a training state that memory models are given."""

import dataclasses

import jax
import pytest
from flax.traverse_util import flatten_dict

from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.families import abstract_model, gradient_dtypes
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives.flow_matching import FlowMatching
from alload_jax.planning.analytic import ALL_TRAINED, GRADIENT_BYTES, state_bytes
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.remat_choice import trained_of
from alload_jax.training.state import TrainingSpec, abstract_state

PLAIN = WanConfig(dim=128, ffn_dim=256, num_heads=2, num_layers=2, freq_dim=8, dtype="float32")
LORA = WanConfig(**{**vars(PLAIN), "lora": LoraConfig(rank=8)})
ADAPTERS = ParametersConfig().with_lora()


@pytest.mark.parametrize(
    ("model", "parameters"), [(PLAIN, ParametersConfig()), (LORA, ADAPTERS)], ids=["all", "lora"]
)
@pytest.mark.parametrize(
    "optimizer",
    [
        {},
        {"ema_decay": None},
        {"name": "adamw8bit", "ema_decay": None},
        {"name": "adafactor", "accumulate_dtype": "bfloat16"},
        {"name": "lion", "mu_dtype": "bfloat16"},
        {"name": "muon"},
    ],
    ids=str,
)
def test_it_is_that_of_the_state_that_is_made(model, parameters, optimizer):
    config = OptimizerConfig(**optimizer)
    params = abstract_model(model).params
    trained = trained_of(params, parameters, config)
    assert (trained == ALL_TRAINED) == (model is PLAIN and not optimizer)
    spec = TrainingSpec(
        model, FlowMatching(), make_optimizer(config, 10), config.ema_decay, parameters
    )
    state = abstract_state(spec, make_mesh(MeshConfig(), jax.devices()[:1]), 0)
    made = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    sums = {"float32": 4, "bfloat16": 2}[config.accumulate_dtype]
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    predicted = state_bytes(total, trained) - count * (GRADIENT_BYTES + sums)
    assert abs(predicted - made) < 200  # the step, the key and counters of the optimizer


def test_gradients_that_stay_in_16_bits_take_half_of_their_bytes():
    model = dataclasses.replace(PLAIN, dtype="bfloat16")
    params, optimizer = abstract_model(model).params, OptimizerConfig()
    narrow = gradient_dtypes(model)
    wide, less = (
        trained_of(params, ParametersConfig(), optimizer, accumulates=False, narrow=each)
        for each in ({}, narrow)
    )
    flat = flatten_dict(params, sep="/")
    count = sum(leaf.size for leaf in flat.values())
    halved = sum(flat[name].size for name in narrow)
    assert 0 < halved < count
    assert (wide.bytes_each - less.bytes_each) * count == pytest.approx(2 * halved)
