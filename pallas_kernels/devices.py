"""What tracing can know: the device, what can be lowered for it, how an array is split."""

import importlib
import math
from collections.abc import Callable, Mapping

import jax
from jax.sharding import AxisType, NamedSharding

_CORES = 132
HOPPER = ("NVIDIA H200", "NVIDIA H100")
"""Beginnings of the kinds of devices with the chip that kernels were measured on."""


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


# ---------------------------------------------------------------- how an array is split


def visible_sharding(x: jax.Array) -> NamedSharding | None:
    """How x is split, where its type says so: over a mesh whose axes are Explicit."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or _hidden_axes(x):
        return None
    return NamedSharding(sharding.mesh, sharding.spec)


def _hidden_axes(x: jax.Array) -> list[str]:
    """Auto axes of the mesh in use, of more than one device: x may be split over them unseen."""
    mesh = jax.typeof(x).sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1]


def mesh_axes(sharding: NamedSharding | None, dimension: int) -> tuple[str, ...]:
    """Names of the mesh axes that split a dimension of x; empty if nothing does."""
    spec = () if sharding is None else tuple(sharding.spec)
    axes = spec[dimension] if dimension < len(spec) else None
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def shards_of(sharding: NamedSharding | None, dimension: int) -> int:
    """How many parts a dimension of x is split into."""
    names = mesh_axes(sharding, dimension)
    return math.prod(sharding.mesh.shape[name] for name in names) if sharding is not None else 1


def elements_of_shard(x: jax.Array, sharding: NamedSharding | None) -> tuple[int, int]:
    """How many elements of x [B, S, D] each device holds, and how wide its part is."""
    shards = [shards_of(sharding, dimension) for dimension in range(3)]
    return x.size // math.prod(shards), x.shape[-1] // shards[2]


def unsupported_sharding(
    x: jax.Array,
    sharding: NamedSharding | None,
    *,
    name: str = "x",
    axes: str = "batch axes, sequence axes, None",
    whole: Mapping[int, tuple[str, str]] | None = None,
    sizes: tuple[int, ...] | None = None,
) -> Exception | None:
    """Why an array cannot be computed shard by shard, as the error to raise; None if it can.

    Args:
      x: the array.
      sharding: how it is split; None on one device.
      name: of the array, for messages.
      axes: what splits its dimensions, for messages.
      whole: dimensions that nothing may split: what is split then, and what to do about it.
      sizes: that shards must divide; None for the array's own.
    """
    if sharding is None:
        if hidden := _hidden_axes(x):
            return ValueError(
                f"tracing cannot see how {name} is split over the Auto axes {hidden} of the mesh; "
                f"give sharding=NamedSharding(mesh, P({axes}))"
            )
        return None
    for dimension, (what, advice) in (whole or {}).items():
        if split := mesh_axes(sharding, dimension):
            return NotImplementedError(f"{name}'s {what} split over {', '.join(split)}{advice}")
    for dimension, size in enumerate(sizes or x.shape):
        if size % (shards := shards_of(sharding, dimension)):
            names = ", ".join(mesh_axes(sharding, dimension))
            return ValueError(
                f"{shards} shards over {names} do not divide {size} of {name} {x.shape}"
            )
    return None


# ---------------------------------------------------------------- what can be lowered


def unsupported_triton(x: jax.Array, *, interpret: bool) -> Exception | None:
    """Why Triton's kernels cannot take x here, as the error to raise; None if they can.

    Args:
      x: an operand.
      interpret: whether they run in Pallas's interpreter, on any device.
    """
    return (
        _missing("triton", "Triton; use 'xla' or 'auto'")
        or (None if interpret else unsupported_triton_device())
        or _unsupported_manual_axes(x)
    )


def unsupported_mosaic(x: jax.Array) -> Exception | None:
    """Why Mosaic's kernels cannot take x here, as the error to raise; None if they can."""
    return (
        _missing("mosaic_gpu", "Mosaic GPU; use 'auto'")
        or unsupported_mosaic_device()
        or _unsupported_manual_axes(x)
    )


def lowers_triton() -> bool:
    """Whether this JAX lowers kernels through Triton."""
    return _missing("triton", "") is None


def _missing(lowering: str, words: str) -> Exception | None:
    """Why this JAX cannot lower kernels."""
    try:
        importlib.import_module(f"jax.experimental.pallas.{lowering}")
    except ImportError:
        return NotImplementedError(
            f"JAX {jax.__version__} does not lower Pallas kernels through {words}"
        )
    return None


def _unsupported_manual_axes(x: jax.Array) -> Exception | None:
    """Why a kernel cannot take x inside the `shard_map` in use."""
    if getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", None):
        return NotImplementedError(
            "x is inside a shard_map that checks how values vary; give that check_vma=False, "
            "or use 'xla'"
        )
    return None


def unsupported_triton_device() -> Exception | None:
    """Why this device cannot run them, as the error to raise; None if it can."""
    # Triton has no bfloat16 below 8.0.
    return _unsupported_device(
        lambda capability: capability.replace(".", "").isdecimal() and float(capability) >= 8,
        "8.0 or later; use 'xla'",
        ", or give interpret=True to try it without one",
    )


def unsupported_mosaic_device() -> Exception | None:
    """Why this device cannot run them, as the error to raise; None if it can."""
    # Only Hopper has the instructions for matrix products that the kernels use.
    return _unsupported_device(
        lambda capability: capability == "9.0", "9.0 (H100, H200); use 'triton' or 'auto'"
    )


def _unsupported_device(
    fits: Callable[[str], bool], needed: str, without_gpu: str = ""
) -> Exception | None:
    device = current_device()
    if device.platform != "gpu":
        return NotImplementedError(
            f"the backend is {device.platform!r}, not 'gpu'; use 'xla' or 'auto'{without_gpu}"
        )
    capability = str(getattr(device, "compute_capability", None))
    if not fits(capability):
        return NotImplementedError(
            f"{device.device_kind} has compute capability {capability}, and it needs NVIDIA's "
            f"{needed}"
        )
    return None
