"""A loop over layers that keeps arrays in the host's memory: what the backward pass needs, weights.

Arrays go there and come back while layers compute. `jax.checkpoint` can offload them, too: a loop
that JAX derives asks for the arrays of a layer when that layer begins, and waits for them. This one
asks for them a layer ahead, and for weights in the host's memory, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import PyTree, PyTreeDef

KeptArrays = dict[str, list[jax.Array]]
"""Arrays that the derivatives of an iteration need, each once: `given` are parameters and shared
arrays, which the backward pass has anyway, `moved` those that go to the host, and `left` those that
stay on the device."""


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Recipe:
    """How the derivatives of an iteration's steps are put together from arrays.

    Attributes:
      differentiated: which leaves of [parameters, shared arrays] have a gradient.
      trees: structure of each step's derivative.
      places: of each step's arrays: name of the list in `KeptArrays`, and number there.
      late: which of the arrays that move do so while the next iteration computes.
    """

    differentiated: PyTree
    trees: list[PyTreeDef] = field(default_factory=list)
    places: list[list[tuple[str, int]]] = field(default_factory=list)
    late: list[bool] = field(default_factory=list)

    def add(self, derivative: Callable, kept: KeptArrays, least_moved: float) -> None:
        """Takes a step's derivative apart, as `jax.vjp` returns it.

        Args:
          derivative: of the step.
          kept: arrays of the steps before, to which its own are added.
          least_moved: bytes below which an array stays on the device.
        """
        leaves, tree = jax.tree.flatten(derivative)
        self.trees.append(tree)
        self.places.append([])
        for leaf in leaves:
            known = ((name, n) for name in kept for n, x in enumerate(kept[name]) if x is leaf)
            if (place := next(known, None)) is None:
                name = "moved" if bytes_of(leaf) >= least_moved else "left"
                place = name, len(kept[name])
                kept[name].append(leaf)
            self.places[-1].append(place)

    def derivatives(self, **arrays: Sequence[jax.Array]) -> list[Callable[[PyTree], PyTree]]:
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


class Traced(NamedTuple):
    """A function as a jaxpr, beside the arrays over which it closes.

    Attributes:
      jaxpr: of the flat arguments; its `consts` are those arrays.
      tree: structure of what it returns.
    """

    jaxpr: ClosedJaxpr
    tree: PyTreeDef

    @classmethod
    def of(cls, function: Callable, *example: PyTree) -> "Traced":
        """Traces a function for arguments like the given ones."""
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*example)
        return cls(jaxpr, jax.tree.structure(shapes))

    def call(self, *arguments: PyTree) -> PyTree:
        """Runs it, with other arrays in place of its own as the last argument."""
        *given, arrays = arguments
        run = jaxpr_as_fun(ClosedJaxpr(self.jaxpr.jaxpr, arrays))
        return jax.tree.unflatten(self.tree, run(*jax.tree.leaves(given)))

    def named(self, name: str) -> list[bool]:
        """Which of the flat results were given the name by `checkpoint_name`."""
        jaxpr = self.jaxpr.jaxpr
        origin = {variable: each for each in jaxpr.eqns for variable in each.outvars}
        found = []
        for variable in jaxpr.outvars:
            each = None if isinstance(variable, Literal) else origin.get(variable)
            while each is not None and each.primitive.name == "reduce_precision":
                each = origin.get(each.invars[0])  # `jax.checkpoint` adds it to what it keeps
            found.append(each is not None and each.params.get("name") == name)
        return found


_SMALL = 16
"""Arrays of fewer bytes than this part of a layer's input stay on the device: each array to be
moved is one more for XLA to schedule."""

COMPILER_OPTIONS = {
    # Those of a layer move together. By default a third waits until one of two has arrived.
    "xla_gpu_experimental_parallel_async_compute_limit": 8,
    # In a graph of CUDA they would move in turn with the layer's kernels.
    "xla_gpu_enable_command_buffer": "",
}
"""XLA's options, on GPUs, for programs with such a loop. Without them nothing hides the moves."""


class Step(NamedTuple):
    """One of the steps that an iteration of the loop takes in turn.

    Attributes:
      apply: (x, parameters of the iteration) → (x, auxiliary values); it may close over arrays.
      wrap: `jax.checkpoint` with the policy that says what the backward pass keeps.
      to_host: whether that is kept in the host's memory.
    """

    apply: Callable[..., tuple[PyTree, PyTree]]
    wrap: Callable[[Callable], Callable]
    to_host: bool


def host_scan(
    steps: Sequence[Step], x: PyTree, layers: PyTree, last_output: str
) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Runs the steps once for each entry of `layers`, as `jax.lax.scan` would.

    It has reverse-mode derivatives; derivatives of those in forward mode alone. They cannot be
    batched by `jax.vmap`.

    Args:
      steps: taken in turn in each iteration.
      x: input of the first step; outputs of all steps are like it.
      layers: parameters, stacked over iterations; those in the host's memory have no gradient.
      last_output: name, by `checkpoint_name`, of what steps compute when they are almost done. It
        moves to the host while the next iteration computes, and all else at once.

    Returns:
      The last output; auxiliary values of each step, stacked over iterations.
    """
    traced = [Traced.of(each.apply, x, _first(layers)) for each in steps]
    closed = [
        each._replace(apply=each.wrap(one.call)) for each, one in zip(steps, traced, strict=True)
    ]
    return _scan(tuple(closed), last_output, x, layers, [one.jaxpr.consts for one in traced])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(
    steps: tuple[Step, ...], last_output: str, x: PyTree, layers: PyTree, shared: PyTree
) -> PyTree:
    del last_output

    def iteration(carry: PyTree, number: PyTree) -> tuple[PyTree, PyTree]:
        x, arrived = carry
        on_way = _weights(layers, number + 1)
        layer, auxiliary = _layer(layers, number, arrived), []
        for step, arrays in zip(steps, shared, strict=True):
            x, values = step.apply(x, layer, arrays)
            auxiliary.append(values)
        return (x, on_way), tuple(auxiliary)

    numbers = jnp.arange(_length(layers))
    (x, _), auxiliary = jax.lax.scan(iteration, (x, _weights(layers, 0)), numbers)
    return x, auxiliary


def _forward(
    steps: tuple[Step, ...], last_output: str, *arguments: PyTree
) -> tuple[PyTree, PyTree]:
    """The arguments' leaves are pairs of a value and whether it is differentiated.

    An iteration moves its own arrays, and the late ones of the iteration before.
    """
    x, layers, shared = jax.tree.map(lambda leaf: leaf.value, arguments)
    _, *differentiated = jax.tree.map(
        lambda leaf: leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact), arguments
    )
    recipe = Recipe(differentiated)
    least_moved = max(map(bytes_of, jax.tree.leaves(x))) / _SMALL

    def iteration(x: PyTree, layer: PyTree) -> tuple[list[jax.Array], PyTree]:
        kept: KeptArrays = {"given": jax.tree.leaves((layer, shared)), "moved": [], "left": []}
        chosen, others = _split([layer, shared], differentiated)
        auxiliary = []
        for number, step in enumerate(steps):

            def apply(x: PyTree, chosen: PyTree, number: int = number, step: Step = step) -> PyTree:
                layer, shared = _joined(chosen, others)
                return step.apply(x, layer, shared[number])

            (x, values), derivative = jax.vjp(apply, x, chosen)
            recipe.add(derivative, kept, least_moved if step.to_host else math.inf)
            auxiliary.append(values)
        return kept["moved"], (x, tuple(auxiliary), kept["left"])

    traced = Traced.of(iteration, x, _first(layers))
    moved, _ = jax.tree.unflatten(traced.tree, traced.jaxpr.out_avals)
    recipe.late.extend(traced.named(last_output)[: len(moved)])
    nothing = [jnp.zeros(each.shape, each.dtype) for each in recipe.parted(moved)[1]]

    def delayed(carry: PyTree, number: PyTree) -> tuple[PyTree, PyTree]:
        x, before, arrived = carry
        on_way = _weights(layers, number + 1)
        layer = _layer(layers, number, arrived)
        moved, (x, auxiliary, left) = traced.call(x, layer, traced.jaxpr.consts)
        soon, late = recipe.parted(moved)
        kept = jax.device_put((soon, before), jax.memory.Space.Host)
        return (x, late, on_way), (auxiliary, left, kept)

    numbers, begin = jnp.arange(_length(layers)), (x, nothing, _weights(layers, 0))
    (x, last, _), (auxiliary, left, on_host) = jax.lax.scan(delayed, begin, numbers)
    return (x, auxiliary), (layers, shared, last, on_host, left, recipe)


def _backward(
    steps: tuple[Step, ...], last_output: str, kept: PyTree, cotangents: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    """An iteration fetches the arrays of the next one, which is for the entry before."""
    del steps, last_output
    layers, shared, last, (soon, late), left, recipe = kept
    end, of_auxiliary = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, SymbolicZero) else leaf,
        cotangents,
        is_leaf=lambda leaf: isinstance(leaf, SymbolicZero),
    )
    length = _length(layers)
    chosen, _ = _split([layers, shared], recipe.differentiated)
    zeros = jax.tree.map(jnp.zeros_like, chosen)

    def iteration(carry: PyTree) -> PyTree:
        turn, cotangent, (of_layers, of_shared), arrived, weights = carry
        number = length - 1 - turn
        # Late arrays stand one entry behind. −1 is read as 0, by the last turn, in vain.
        on_way = recipe.united(_fetched(soon, number - 1), _fetched(late, number))
        weights_on_way = _weights(layers, number - 1)
        layer = _layer(layers, number, weights)
        here, of_values = _entry((left, of_auxiliary), _not_by_counter(number))
        derivatives = recipe.derivatives(
            given=jax.tree.leaves((layer, shared)), moved=arrived, left=here
        )
        total: PyTree = None
        for derivative, values in zip(reversed(derivatives), reversed(of_values), strict=True):
            cotangent, part = derivative((cotangent, values))
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        of_layer, in_shared = total
        of_shared = jax.tree.map(jnp.add, of_shared, in_shared)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
        of_layers = jax.tree.map(put, of_layers, of_layer)
        return turn + 1, cotangent, (of_layers, of_shared), on_way, weights_on_way

    arrived = recipe.united(_fetched(soon, length - 1), last), _weights(layers, length - 1)
    # XLA makes a copy of what is found by the counter of a loop, and else a kernel. `scan` hides
    # its counter.
    _, cotangent, (of_layers, of_shared), *_ = jax.lax.while_loop(
        lambda carry: carry[0] < length, iteration, (0, end, tuple(zeros), *arrived)
    )
    return cotangent, of_layers, of_shared


_scan.defvjp(_forward, _backward, symbolic_zeros=True)


def _length(layers: PyTree) -> int:
    return len(jax.tree.leaves(layers)[0])


def _not_by_counter(number: jax.Array) -> jax.Array:
    """The number, so that XLA does not know it for the counter of a loop.

    It makes copies of what is found by that, on a few streams. Small ones, for which a layer would
    wait, are then behind those to and from the host.
    """
    return jnp.maximum(number, 0)


def _entry(stacks: PyTree, number: PyTree) -> PyTree:
    """An entry of stacked arrays."""
    return jax.tree.map(
        lambda each: jax.lax.dynamic_index_in_dim(
            each, number, keepdims=False, allow_negative_indices=False
        ),
        stacks,
    )


def _fetched(stacks: list[jax.Array], number: PyTree) -> list[jax.Array]:
    """An entry of stacks in the host's memory, on the device."""
    return jax.device_put(_entry(stacks, number), jax.memory.Space.Device)


def is_on_host(array: jax.Array) -> bool:
    """Whether an array, or one that is traced, is in the host's memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def _weights(layers: PyTree, number: PyTree) -> list[jax.Array]:
    """What an iteration needs of the parameters in the host's memory, on the device.

    Past the last iteration, and before the first, it is that of the nearest, in vain.
    """
    number = jnp.clip(number, 0, _length(layers) - 1)
    return _fetched([leaf for leaf in jax.tree.leaves(layers) if is_on_host(leaf)], number)


def _layer(layers: PyTree, number: PyTree, weights: list[jax.Array]) -> PyTree:
    """The parameters of an iteration, with those that `_weights` has fetched."""
    fetched = iter(weights)
    leaves, tree = jax.tree.flatten(layers)
    number = _not_by_counter(number)
    found = [next(fetched) if is_on_host(leaf) else _entry(leaf, number) for leaf in leaves]
    return jax.tree.unflatten(tree, found)


def _first(layers: PyTree) -> PyTree:
    """Shapes of an entry of stacked parameters."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def _split(tree: PyTree, chosen: PyTree) -> tuple[PyTree, PyTree]:
    """The chosen leaves of a tree and the others, each with None in place of the rest."""
    return (
        jax.tree.map(lambda leaf, is_chosen: leaf if is_chosen else None, tree, chosen),
        jax.tree.map(lambda leaf, is_chosen: None if is_chosen else leaf, tree, chosen),
    )


def _joined(chosen: PyTree, others: PyTree) -> PyTree:
    """The tree that `_split` took apart."""
    return jax.tree.map(
        lambda one, other: other if one is None else one,
        chosen,
        others,
        is_leaf=lambda leaf: leaf is None,
    )
