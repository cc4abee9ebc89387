"""Partition rules: which axis of which parameter is split over which mesh axes."""

import math
import re
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.errors import InputError
from alload_jax.sharding.mesh import AnyMesh

Rules = tuple[tuple[str, PartitionSpec], ...]
"""(pattern, rule) pairs of a model family; the first pattern found in a path decides. Paths of
optimizer state and EMA end as those of their parameters."""

ZERO_AXES = ("context", "data")
"""Over which optimizer state and EMA are split beyond their parameters, from the fastest links."""


def path_name(path: tuple[Any, ...]) -> str:
    """`blocks/self_attention/query/kernel` from a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def tree_shardings(tree: Any, mesh: AnyMesh, rules: Rules) -> Any:
    """A NamedSharding for every leaf of a tree of arrays (or of their shapes).

    Raises:
      InputError: an axis to be split is not a multiple of the mesh axis.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        spec = _first_match(name, rules) if leaf.ndim else PartitionSpec()
        _check_divides(name, leaf.shape, spec, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def zero_shardings(
    tree: Any, mesh: AnyMesh, rules: Rules, over: tuple[str, ...] = ZERO_AXES
) -> Any:
    """`tree_shardings`, split over replicas too where that goes (ZeRO, arXiv 1910.02054).

    For what only the update needs: gradients, optimizer state, EMA. Each replica updates its own
    part of the parameters. Some optimizers keep arrays of other shapes for a parameter, such as
    means over an axis or scales of blocks: these are split where its rule fits, else replicated.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        spec = _first_match(path_name(path), rules)
        fitting = spec if len(spec) <= leaf.ndim else PartitionSpec()
        whole = PartitionSpec(
            *(
                axes if size % math.prod(mesh.shape[axis] for axis in _names(axes)) == 0 else None
                for size, axes in zip(leaf.shape, fitting, strict=False)
            )
        )
        return NamedSharding(mesh, _split_further(leaf.shape, whole, mesh, over))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _split_further(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh, over: tuple[str, ...]
) -> PartitionSpec:
    """Over more mesh axes along the axis of the array that `fsdp` splits, as far as they divide."""
    split = [_names(part) for part in spec]
    for axis, names in enumerate(split):
        if "fsdp" not in names:
            continue
        for more in over:
            if shape[axis] % math.prod(mesh.shape[name] for name in (*names, more)) == 0:
                names += (more,)
        split[axis] = names
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in split))


def _first_match(name: str, rules: Rules) -> PartitionSpec:
    array = name.removesuffix("/values")  # of a kernel with values and scale
    for pattern, spec in rules:
        if re.search(pattern, array):
            return spec
    raise ValueError(f"no partition rule matches {name}; end the rules with one for '.'")


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else (axes,) if axes else ()


def _check_divides(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> None:
    for size, axes in zip(shape, spec, strict=False):
        wide = [axis for axis in _names(axes) if mesh.shape[axis] > 1]
        if size % math.prod(mesh.shape[axis] for axis in wide):
            what = "·".join(f"mesh.{axis}" for axis in wide)
            value = math.prod(mesh.shape[axis] for axis in wide)
            raise InputError(
                f"{what} is {value}, which does not divide {size} of {name} {shape}; choose "
                f"{what} or the model's widths so that it does"
            )
