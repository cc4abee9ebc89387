"""Partition rules: which axis of which parameter is split over which mesh axis."""

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alload_jax.errors import InputError

Rules = tuple[tuple[str, PartitionSpec], ...]

DIT_RULES: Rules = (
    (r"head/out/kernel$", PartitionSpec("fsdp", None)),
    (r"blocks/.*/kernel$", PartitionSpec(None, None, "fsdp")),
    (r"kernel$|embedding$", PartitionSpec(None, "fsdp")),
    (r".", PartitionSpec()),
)
"""(pattern, rule) for the transformer; the first pattern found in a path decides. Blocks have a
leading layer axis. The same rules hold for optimizer state and EMA, whose paths end alike."""


def path_name(path: tuple[Any, ...]) -> str:
    """`blocks/self_attention/query/kernel` from a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def tree_shardings(tree: Any, mesh: Mesh, rules: Rules = DIT_RULES) -> Any:
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


def _first_match(name: str, rules: Rules) -> PartitionSpec:
    for pattern, spec in rules:
        if re.search(pattern, name):
            return spec
    raise ValueError(f"no partition rule matches {name}; end the rules with one for '.'")


def _check_divides(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise InputError(
                f"mesh.{axis} is {mesh.shape[axis]}, which does not divide {size} of {name} "
                f"{shape}; choose mesh.{axis} or the model's widths so that it does"
            )
