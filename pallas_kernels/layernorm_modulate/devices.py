"""What tracing can know: the device to run on, and how an array is split over it."""

import math

import jax
from jax.sharding import AxisType, NamedSharding

_OLDEST = 8.0
"""Compute capability below which Triton has no bfloat16."""


def device_kind() -> str:
    """The kind of the first device, such as "NVIDIA H200"."""
    return jax.devices()[0].device_kind


def visible_sharding(x: jax.Array) -> NamedSharding | None:
    """How x is split, where its type says so: over the Explicit axes of a mesh."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, sharding.spec)


def obstacle(x: jax.Array, sharding: NamedSharding | None) -> Exception | None:
    """Why the kernels cannot take x [B, S, D] here, as the error to raise; None if they can."""
    if jax.default_backend() != "gpu":
        return NotImplementedError(
            f"the backend is {jax.default_backend()!r}, not 'gpu'; use 'xla' or 'auto'"
        )
    capability = float(jax.devices()[0].compute_capability)
    if capability < _OLDEST:
        return NotImplementedError(
            f"{device_kind()} has compute capability {capability}, less than {_OLDEST}; use 'xla'"
        )
    return _sharding_obstacle(x, sharding)


def _sharding_obstacle(x: jax.Array, sharding: NamedSharding | None) -> Exception | None:
    if sharding is None:
        mesh = jax.typeof(x).sharding.mesh
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        auto = [name for name, kind in kinds if kind == AxisType.Auto]
        if math.prod(mesh.shape[name] for name in auto) > 1:
            return ValueError(
                f"tracing cannot see how x is split over the Auto axes {auto} of the mesh; "
                "give sharding=NamedSharding(mesh, P(batch axes, sequence axes, None))"
            )
        return None
    spec = (*sharding.spec, None, None, None)[:3]
    if spec[2] is not None:
        return NotImplementedError(
            f"x's width is split over {spec[2]!r}, and a row's statistics need all of it; "
            "split batch or sequence, or use 'xla'"
        )
    for size, axes in zip(x.shape, spec[:2], strict=False):
        names = () if axes is None else (axes,) if isinstance(axes, str) else axes
        shards = math.prod(sharding.mesh.shape[name] for name in names)
        if size % shards:
            return ValueError(f"{shards} shards over {axes!r} do not divide {size} of x {x.shape}")
    return None
