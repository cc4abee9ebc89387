"""What tracing can know: the device to run on, and how an array is split over it."""

import math

import jax
from jax.sharding import AxisType, NamedSharding

_CORES = 132


def device_kind() -> str:
    """The kind of the device to run on, such as "NVIDIA H200"."""
    return current_device().device_kind


def core_count() -> int:
    """Multiprocessors of the device to run on; an H200's where it has none, as a CPU."""
    return getattr(current_device(), "core_count", None) or _CORES


def current_device() -> jax.Device:
    """The default device if one was chosen, else the first."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]


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


def unseen_split(x: jax.Array) -> Exception | None:
    """Why a kernel cannot know how x [B, S, D] without a sharding is split; None if it can."""
    if hidden := hidden_axes(x):
        return ValueError(
            f"tracing cannot see how x is split over the Auto axes {hidden} of the mesh; "
            "give sharding=NamedSharding(mesh, P(batch axes, sequence axes, None))"
        )
    return None


def mesh_axes(sharding: NamedSharding | None, dimension: int) -> tuple[str, ...]:
    """Names of the mesh axes that split a dimension of x; empty if nothing does."""
    spec = () if sharding is None else tuple(sharding.spec)
    axes = spec[dimension] if dimension < len(spec) else None
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def shards_of(sharding: NamedSharding | None, dimension: int) -> int:
    """How many parts a dimension of x is split into."""
    names = mesh_axes(sharding, dimension)
    return math.prod(sharding.mesh.shape[name] for name in names) if sharding is not None else 1


def undivided(sharding: NamedSharding, sizes: tuple[int, ...]) -> Exception | None:
    """Why arrays of these sizes cannot be split into equal shards; None if they can."""
    for dimension, size in enumerate(sizes):
        if size % (shards := shards_of(sharding, dimension)):
            names = ", ".join(mesh_axes(sharding, dimension))
            return ValueError(f"{shards} shards over {names} do not divide {size} of {sizes}")
    return None


def elements_per_device(x: jax.Array, sharding: NamedSharding | None) -> int:
    """How many elements of x [B, S, D] each device holds."""
    return x.size // (shards_of(sharding, 0) * shards_of(sharding, 1))


def unsupported_manual_axes(x: jax.Array) -> Exception | None:
    """Why a kernel cannot take x inside the `shard_map` in use; None if it can."""
    if getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", None):
        return NotImplementedError(
            "x is inside a shard_map that checks how values vary; give that check_vma=False, "
            "or use 'xla'"
        )
    return None
