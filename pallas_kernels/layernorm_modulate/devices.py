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
    """How x is split, where its type says so: over a mesh whose axes are Explicit."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or hidden_axes(x):
        return None
    return NamedSharding(sharding.mesh, sharding.spec)


def hidden_axes(x: jax.Array) -> list[str]:
    """Auto axes of the mesh in use, of more than one device: x may be split over them unseen."""
    mesh = jax.typeof(x).sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1]


def shards_of(sharding: NamedSharding | None) -> int:
    """How many parts x is split into."""
    if sharding is None:
        return 1
    names = [axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec if axes]
    return math.prod(sharding.mesh.shape[name] for axes in names for name in axes)


def obstacle(x: jax.Array, sharding: NamedSharding | None) -> Exception | None:
    """Why the kernels cannot take x [B, S, D] here, as the error to raise; None if they can."""
    return _device_obstacle() or _manual_obstacle(x) or sharding_obstacle(x, sharding)


def _device_obstacle() -> Exception | None:
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    device = chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]
    if device.platform != "gpu":
        return NotImplementedError(
            f"the backend is {device.platform!r}, not 'gpu'; use 'xla' or 'auto'"
        )
    capability = str(getattr(device, "compute_capability", None))
    if not capability.replace(".", "").isdecimal() or float(capability) < _OLDEST:
        return NotImplementedError(
            f"{device.device_kind} has compute capability {capability}, and they need NVIDIA's "
            f"{_OLDEST} or later; use 'xla'"
        )
    return None


def _manual_obstacle(x: jax.Array) -> Exception | None:
    if getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", None):
        return NotImplementedError(
            "x is inside a shard_map that checks how values vary; give that check_vma=False, "
            "or use 'xla'"
        )
    return None


def sharding_obstacle(x: jax.Array, sharding: NamedSharding | None) -> Exception | None:
    """Why x [B, S, D] cannot be worked on shard by shard; None if it can."""
    if sharding is None:
        if hidden := hidden_axes(x):
            return ValueError(
                f"tracing cannot see how x is split over the Auto axes {hidden} of the mesh; "
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
