"""The arrays that derivatives need, apart from the derivatives, so that they can be moved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax


class KeptArrays:
    """Arrays that the derivatives of an iteration need, each once.

    Attributes:
      given: parameters and shared arrays, which the backward pass has anyway.
      moved: those that go to the host.
      left: those that stay on the device.
    """

    def __init__(self, given: Any, least_moved: float):
        """`least_moved`: bytes below which an array stays on the device."""
        self.given, self._least_moved = jax.tree.leaves(given), least_moved
        self.moved: list[jax.Array] = []
        self.left: list[jax.Array] = []

    def place(self, array: jax.Array, *, to_host: bool) -> tuple[str, int]:
        """The list in which the array is, and its number there."""
        for name in ("given", "moved", "left"):
            for number, other in enumerate(getattr(self, name)):
                if other is array:
                    return name, number
        name = "moved" if to_host and bytes_of(array) >= self._least_moved else "left"
        found = getattr(self, name)
        found.append(array)
        return name, len(found) - 1


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Recipe:
    """How the derivatives of an iteration's steps are put together from arrays.

    Attributes:
      differentiated: which leaves of [parameters, shared arrays] have a gradient.
      trees: structure of each step's derivative.
      places: of each step's arrays, see `KeptArrays.place`.
      late: which of the arrays that move do so while the next iteration computes.
    """

    differentiated: Any
    trees: list[Any] = field(default_factory=list)
    places: list[list[tuple[str, int]]] = field(default_factory=list)
    late: list[bool] = field(default_factory=list)

    def add(self, derivative: Callable, kept: KeptArrays, *, to_host: bool) -> None:
        """Takes a step's derivative apart, as `jax.vjp` returns it."""
        leaves, tree = jax.tree.flatten(derivative)
        self.trees.append(tree)
        self.places.append([kept.place(leaf, to_host=to_host) for leaf in leaves])

    def derivatives(self, **arrays: Sequence[jax.Array]) -> list[Callable[[Any], Any]]:
        """Those that `add` took apart, with the arrays of `KeptArrays`, by name of the list."""
        return [
            jax.tree.unflatten(tree, [arrays[name][number] for name, number in places])
            for tree, places in zip(self.trees, self.places, strict=True)
        ]

    def parted(self, moved: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Arrays that move at once, and late ones."""
        pairs = list(zip(moved, self.late, strict=True))
        return [each for each, late in pairs if not late], [each for each, late in pairs if late]

    def united(self, soon: Sequence[jax.Array], late: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays that `parted` parts."""
        of = {False: iter(soon), True: iter(late)}
        return [next(of[is_late]) for is_late in self.late]


def bytes_of(array: jax.Array) -> int:
    """Bytes of an array's numbers."""
    return array.size * array.dtype.itemsize
