"""Meshes of devices, and which ranks of a plan they take."""

import jax
import pytest

from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sharding.mesh import MeshConfig, local_plan_ranks, make_mesh, ranks_of
from alload_jax.training.state import init_state, training_spec

needs_devices = pytest.mark.skipif(
    len(jax.devices("cpu")) < 8 or jax.default_backend() != "cpu", reason="needs 8 CPU devices"
)


@needs_devices
def test_an_axis_that_does_not_divide_is_named():
    mesh = make_mesh(MeshConfig(fsdp=8), jax.devices()[:8])
    model = WanConfig(dim=12, num_heads=2, ffn_dim=16)
    with pytest.raises(InputError, match=r"mesh.fsdp is 8, which does not divide 12 of \S+kernel"):
        init_state(training_spec(model), mesh, seed=0)


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


def test_gpus_of_several_hosts_form_a_mesh_with_hosts_along_its_first_axis():
    """JAX 0.11 gives the GPUs of each host a `slice_index` of their own."""

    class Gpu:
        platform, device_kind = "gpu", "NVIDIA H200"

        def __init__(self, number, process):
            self.id, self.process_index, self.slice_index = number, process, process

    gpus = [Gpu(number, number // 2) for number in range(4)]
    mesh = make_mesh(MeshConfig(fsdp=2), gpus)
    assert mesh.devices.shape == (2, 2, 1, 1)
    assert [gpu.process_index for gpu in mesh.devices.flat] == [0, 0, 1, 1]
