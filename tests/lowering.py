"""Modules for CUDA, made on a host without a GPU."""

import jax


def lowered_for_cuda(function, *arguments):
    """The text of a function's module for CUDA, made on a host without one."""
    traced_on = jax.jit(function).trace
    if jax.default_backend() == "gpu":
        return traced_on(*arguments).lower().as_text()
    if jax.__version_info__ < (0, 11):
        return traced_on(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return traced_on(*arguments).lower(lowering_platforms=("cuda",)).as_text()
