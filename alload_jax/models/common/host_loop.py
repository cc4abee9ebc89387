"""A loop over layers that keeps what the backward pass needs in the host's memory.

Arrays go there and come back while layers compute. `jax.checkpoint` can offload them, too: a loop
that JAX derives asks for the arrays of a layer when that layer begins, and waits for them. This one
asks for them a layer ahead.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from alload_jax.models.common.kept_arrays import KeptArrays, Recipe, bytes_of
from alload_jax.models.common.traced import Traced

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

    apply: Callable[..., tuple[Any, Any]]
    wrap: Callable[[Callable], Callable]
    to_host: bool


def host_scan(
    steps: Sequence[Step], x: Any, layers: Any, last_output: str
) -> tuple[Any, tuple[Any, ...]]:
    """Runs the steps once for each entry of `layers`, as `jax.lax.scan` would.

    It has reverse-mode derivatives; derivatives of those in forward mode alone. They cannot be
    batched by `jax.vmap`.

    Args:
      steps: taken in turn in each iteration.
      x: input of the first step; outputs of all steps are like it.
      layers: parameters, stacked over iterations.
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
def _scan(steps: tuple[Step, ...], last_output: str, x: Any, layers: Any, shared: Any) -> Any:
    del last_output

    def iteration(x: Any, layer: Any) -> tuple[Any, Any]:
        auxiliary = []
        for step, arrays in zip(steps, shared, strict=True):
            x, values = step.apply(x, layer, arrays)
            auxiliary.append(values)
        return x, tuple(auxiliary)

    return jax.lax.scan(iteration, x, layers)


def _forward(steps: tuple[Step, ...], last_output: str, *arguments: Any) -> tuple[Any, Any]:
    """The arguments' leaves are pairs of a value and whether it is differentiated.

    An iteration moves its own arrays, and the late ones of the iteration before.
    """
    x, layers, shared = jax.tree.map(lambda leaf: leaf.value, arguments)
    _, *differentiated = jax.tree.map(_is_differentiated, arguments)
    recipe = Recipe(differentiated)
    least_moved = max(map(bytes_of, jax.tree.leaves(x))) / _SMALL

    def iteration(x: Any, layer: Any) -> tuple[list[jax.Array], Any]:
        kept = KeptArrays((layer, shared), least_moved)
        chosen, others = _split([layer, shared], differentiated)
        auxiliary = []
        for number, step in enumerate(steps):

            def apply(x: Any, chosen: Any, number: int = number, step: Step = step) -> Any:
                layer, shared = _joined(chosen, others)
                return step.apply(x, layer, shared[number])

            (x, values), derivative = jax.vjp(apply, x, chosen)
            recipe.add(derivative, kept, to_host=step.to_host)
            auxiliary.append(values)
        return kept.moved, (x, tuple(auxiliary), kept.left)

    traced = Traced.of(iteration, x, _first(layers))
    moved, _ = jax.tree.unflatten(traced.tree, traced.jaxpr.out_avals)
    recipe.late.extend(traced.named(last_output)[: len(moved)])
    nothing = [jnp.zeros(each.shape, each.dtype) for each in recipe.parted(moved)[1]]

    def delayed(carry: Any, number: Any) -> tuple[Any, Any]:
        x, before = carry
        layer = _entry(layers, _not_by_counter(number))
        moved, (x, auxiliary, left) = traced.call(x, layer, traced.jaxpr.consts)
        soon, late = recipe.parted(moved)
        return (x, late), (auxiliary, left, jax.device_put((soon, before), jax.memory.Space.Host))

    numbers = jnp.arange(_length(layers))
    (x, last), (auxiliary, left, on_host) = jax.lax.scan(delayed, (x, nothing), numbers)
    return (x, auxiliary), (layers, shared, last, on_host, left, recipe)


def _backward(
    steps: tuple[Step, ...], last_output: str, kept: Any, cotangents: Any
) -> tuple[Any, Any, Any]:
    """An iteration fetches the arrays of the next one, which is for the entry before."""
    del steps, last_output
    layers, shared, last, (soon, late), left, recipe = kept
    end, of_auxiliary = jax.tree.map(
        _instantiated, cotangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero)
    )
    length = _length(layers)
    chosen, _ = _split([layers, shared], recipe.differentiated)
    zeros = jax.tree.map(jnp.zeros_like, chosen)

    def iteration(carry: Any) -> Any:
        turn, cotangent, (of_layers, of_shared), arrived = carry
        number = length - 1 - turn
        # Late arrays stand one entry behind. −1 is read as 0, by the last turn, in vain.
        on_way = recipe.united(_fetched(soon, number - 1), _fetched(late, number))
        layer, here, of_values = _entry((layers, left, of_auxiliary), _not_by_counter(number))
        derivatives = recipe.derivatives(
            given=jax.tree.leaves((layer, shared)), moved=arrived, left=here
        )
        cotangent, (of_layer, in_shared) = _through(derivatives, cotangent, of_values)
        of_shared = _sum(of_shared, in_shared)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
        of_layers = jax.tree.map(put, of_layers, of_layer)
        return turn + 1, cotangent, (of_layers, of_shared), on_way

    arrived = recipe.united(_fetched(soon, length - 1), last)
    # XLA makes a copy of what is found by the counter of a loop, and else a kernel. `scan` hides
    # its counter.
    _, cotangent, (of_layers, of_shared), _ = jax.lax.while_loop(
        lambda carry: carry[0] < length, iteration, (0, end, tuple(zeros), arrived)
    )
    return cotangent, of_layers, of_shared


_scan.defvjp(_forward, _backward, symbolic_zeros=True)


def _through(
    derivatives: Sequence[Callable[[Any], Any]], cotangent: Any, of_values: Sequence[Any]
) -> tuple[Any, Any]:
    """Back through the steps of an iteration: gradients of its x and of the chosen leaves."""
    total = None
    for derivative, values in zip(reversed(derivatives), reversed(of_values), strict=True):
        cotangent, part = derivative((cotangent, values))
        total = part if total is None else _sum(total, part)
    return cotangent, total


def _length(layers: Any) -> int:
    return len(jax.tree.leaves(layers)[0])


def _not_by_counter(number: jax.Array) -> jax.Array:
    """The number, so that XLA does not know it for the counter of a loop.

    It makes copies of what is found by that, on a few streams. Small ones, for which a layer would
    wait, are then behind those to and from the host.
    """
    return jnp.maximum(number, 0)


def _entry(stacks: Any, number: Any) -> Any:
    """An entry of stacked arrays."""
    return jax.tree.map(
        lambda each: jax.lax.dynamic_index_in_dim(
            each, number, keepdims=False, allow_negative_indices=False
        ),
        stacks,
    )


def _fetched(stacks: list[jax.Array], number: Any) -> list[jax.Array]:
    """An entry of stacks in the host's memory, on the device."""
    return jax.device_put(_entry(stacks, number), jax.memory.Space.Device)


def _first(layers: Any) -> Any:
    """Shapes of an entry of stacked parameters."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def _is_differentiated(leaf: Any) -> bool:
    return leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact)


def _instantiated(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _sum(total: Any, part: Any) -> Any:
    return jax.tree.map(jnp.add, total, part)


def _split(tree: Any, chosen: Any) -> tuple[Any, Any]:
    """The chosen leaves of a tree and the others, each with None in place of the rest."""
    return (
        jax.tree.map(lambda leaf, is_chosen: leaf if is_chosen else None, tree, chosen),
        jax.tree.map(lambda leaf, is_chosen: None if is_chosen else leaf, tree, chosen),
    )


def _joined(chosen: Any, others: Any) -> Any:
    """The tree that `_split` took apart."""
    return jax.tree.map(
        lambda one, other: other if one is None else one,
        *(chosen, others),
        is_leaf=lambda leaf: leaf is None,
    )
