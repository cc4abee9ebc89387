"""Groups of devices that run different shapes in the same step do what one device does."""

import jax
import numpy as np
import pytest
from group_cases import plan_for, steps_on, train, trainer_on, write_data

from alload_jax.data.batch import describe
from alload_jax.errors import InputError
from alload_jax.sharding.mesh import MeshConfig, make_mesh

STEPS = 7

pytestmark = pytest.mark.skipif(
    len(jax.devices("cpu")) < 4 or jax.default_backend() != "cpu", reason="needs 4 CPU devices"
)

MESHES = {
    "4 groups": (4, {}),
    "2 groups of fsdp 2": (4, {"fsdp": 2}),
    "2 groups of context 2": (4, {"context": 2}),
    "2 groups of tensor 2": (4, {"tensor": 2}),
}


def mesh_of(devices, **axes):
    return make_mesh(MeshConfig(**axes), jax.devices()[:devices])


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("groups") / "data")


@pytest.mark.parametrize("name", MESHES)
def test_groups_train_as_one_device_that_takes_all_their_micro_batches(manifest, name):
    devices, axes = MESHES[name]
    mesh = mesh_of(devices, **axes)
    plan = plan_for(manifest, mesh)
    layout = plan.layout
    shared = {"ranks": layout.ranks, "ranks_per_group": layout.ranks_per_group}
    same = plan_for(manifest, mesh_of(1), **shared)
    assert same.fingerprint() == plan.fingerprint()
    trainer, found = train(manifest, plan, mesh, STEPS)
    alone, expected = train(manifest, same, mesh_of(1), STEPS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len({loss for loss, _ in found}) == STEPS
    for ours, theirs in zip(
        jax.tree.leaves(trainer.state), jax.tree.leaves(alone.state), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
