"""Training on eight devices computes what training on one does."""

from functools import cache

import jax
import numpy as np
import pytest

from alload_jax.data.batch import Batch
from alload_jax.data.collate import HostStep
from alload_jax.data.loader import place_ahead
from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives import FlowMatching
from alload_jax.sharding.mesh import MeshConfig, local_plan_ranks, make_mesh, ranks_of
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import TrainingSpec, init_state
from alload_jax.training.trainer import Trainer

MODEL = WanConfig(dim=32, ffn_dim=64, num_heads=4, num_layers=2, freq_dim=16, dtype="float32")
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup_steps=2)
STEPS = 5
SHAPES = [(8, 3, 4, 4, 1)]

needs_devices = pytest.mark.skipif(
    len(jax.devices("cpu")) < 8 or jax.default_backend() != "cpu", reason="needs 8 CPU devices"
)


def spec_of(model):
    return TrainingSpec(
        model, FlowMatching(), make_optimizer(OPTIMIZER, STEPS), OPTIMIZER.ema_decay
    )


def host_steps():
    for number in range(STEPS):
        rng = np.random.default_rng(number)
        batches = tuple(
            Batch(
                rng.normal(size=shape).astype(np.float32),
                rng.integers(0, 10, (8, 2)).astype(np.int32),
                np.arange(8, dtype=np.int32) + 8 * number,
                np.zeros(8, np.int32),
                (np.arange(8) < 7).astype(np.float32),
            )
            for shape in SHAPES
        )
        yield HostStep(number, 0, batches, ())


@cache
def losses_on_one_device():
    return train(1)[1]


def train(devices, **axes):
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[:devices])
    spec = spec_of(MODEL)
    trainer = Trainer(spec, mesh, init_state(spec, mesh, seed=0))
    batches = next(host_steps()).batches
    shapes = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), batches)
    list(trainer.compile(shapes))
    losses = [float(trainer.step(step)["loss"]) for step in place_ahead(host_steps(), mesh)]
    return trainer, losses


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 2, "context": 2, "tensor": 2}, {"fsdp": 4}])
def test_eight_devices_have_the_loss_curve_of_one(axes):
    one = losses_on_one_device()
    trainer, eight = train(8, **axes)
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    assert len(set(one)) == STEPS
    kernel = trainer.state.params["blocks"]["feed_forward"]["hidden"]["kernel"]
    shard = kernel.addressable_shards[0].data.shape
    assert shard == (2, 32, 64 // (axes.get("fsdp", 1) * axes.get("tensor", 1)))
    # Optimizer state and EMA are split over replicas too.
    adam, parts = trainer.state.opt_state[1][0], axes["fsdp"] * axes.get("tensor", 1)
    for tree, number in ((trainer.state.params, parts), (trainer.state.ema, 8), (adam.mu, 8)):
        kernel = tree["blocks"]["self_attention"]["query"]["kernel"]
        assert kernel.addressable_shards[0].data.shape == (2, 32, 32 // number)


@needs_devices
def test_an_axis_that_does_not_divide_is_named():
    mesh = make_mesh(MeshConfig(fsdp=8), jax.devices()[:8])
    model = WanConfig(dim=12, num_heads=2, ffn_dim=16)
    with pytest.raises(InputError, match=r"mesh.fsdp is 8, which does not divide 12 of \S+kernel"):
        init_state(spec_of(model), mesh, seed=0)


@needs_devices
@pytest.mark.parametrize("axes", [{"data": 3}, {"fsdp": 3}, {"data": 8, "fsdp": 2}])
def test_a_mesh_that_does_not_fit_is_refused(axes):
    with pytest.raises(InputError, match=r"does not fit 8 cpu device\(s\)"):
        make_mesh(MeshConfig(**axes), jax.devices()[:8])


@needs_devices
def test_a_plan_of_more_ranks_is_shared_evenly():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2), jax.devices()[:4])
    assert ranks_of(mesh) == 4
    assert local_plan_ranks(mesh, 12) == frozenset(range(12))
    with pytest.raises(InputError, match=r"planning.ranks is 6, not a multiple"):
        local_plan_ranks(mesh, 6)
