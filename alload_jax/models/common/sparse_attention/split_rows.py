"""Sparse attention in rows with samples that are split over the ranks of a context group.

All-to-alls exchange tokens for heads, as for dense attention (`split_attention`). Heads of a sparse
layer cost what their densities say, so that each rank gets heads of about the same total density.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from alload_jax.models.common.segments import PADDING, PackedMetadata, SplitRows
from alload_jax.models.common.sparse_attention.head_assignment import balanced_order
from alload_jax.models.common.sparse_attention.profile import Profile
from alload_jax.models.common.sparse_attention.region import Choice, Heads, Rows, attend, measure
from alload_jax.models.common.split_attention import heads_together, tokens_together
from alload_jax.sharding.mesh import CONTEXT


def attend_split(heads: Heads, split: SplitRows, choice: Choice) -> jax.Array:
    """`attend` for the row of one rank, [1, T, H, head_dim]. It must run inside `shard_map`."""
    count = split.split_tokens
    order = jnp.arange(len(heads.number), dtype=jnp.int32)
    if choice.config.balance_heads:
        order = balanced_order(heads.density, jax.lax.axis_size(CONTEXT))
    back = jnp.argsort(order)
    front = _of_tokens(heads, slice(None, count), lambda x: tokens_together(_taken(x, order, back)))
    output = attend(_of_rank(front, order), _group_rows(split), choice)
    outputs = [_taken(heads_together(output), back, order)]
    if count < heads.query.shape[1]:
        behind = _of_tokens(heads, slice(count, None), lambda x: x)
        outputs.append(attend(behind, _own_rows(split), choice))
    return jnp.concatenate(outputs, axis=1)


def measure_split(heads: Heads, packed: PackedMetadata, choice: Choice) -> Profile:
    """`measure` for the row of one rank, [1, M, ...]. It must run inside `shard_map`.

    Each part of a split sample has the values of the sample.
    """
    split = packed.split
    assert split is not None
    count = split.split_tokens
    order = jnp.arange(len(heads.number), dtype=jnp.int32)
    front = _of_tokens(heads, slice(None, count), tokens_together)
    group = measure(_of_rank(front, order), _group_rows(split), choice)
    group = Profile(group.found, *(_all_heads(each) for each in group[1:]))
    offset, exists = packed.tokens.offset, packed.tokens.length > 0
    # A part's place among the group's tokens is in its sample's segment.
    place = jax.lax.axis_index(CONTEXT) * count + jnp.minimum(offset, count - 1)
    in_front = exists & (offset < count)
    found = _of_slots(group, split.split.ids, place, in_front)
    if count == heads.query.shape[1]:
        return found
    behind = _of_tokens(heads, slice(count, None), lambda x: x)
    own = measure(behind, _own_rows(split), choice)
    place = jnp.maximum(offset - count, 0)
    own = _of_slots(own, split.whole.ids, place, exists & ~in_front)
    return jax.tree.map(jnp.add, found, own)


def _group_rows(split: SplitRows) -> Rows:
    layout = None if split.tiles is None else split.tiles.split
    return Rows(layout, split.within_split(), split.split.offset.shape[1])


def _own_rows(split: SplitRows) -> Rows:
    layout = None if split.tiles is None else split.tiles.whole
    return Rows(layout, split.within_whole(), split.whole.offset.shape[1])


def _of_tokens(heads: Heads, tokens: slice, change: Callable[[jax.Array], jax.Array]) -> Heads:
    """The heads of some tokens, each array changed."""
    arrays = (heads.query, heads.key, heads.value, heads.features)
    query, key, value, features = jax.tree.map(lambda x: change(x[:, tokens]), arrays)
    return Heads(query, key, value, features, heads.density, heads.number)


def _of_rank(heads: Heads, order: jax.Array) -> Heads:
    """With density and number of this rank's heads alone."""
    size = len(order) // jax.lax.axis_size(CONTEXT)
    own = jax.lax.dynamic_slice_in_dim(order, jax.lax.axis_index(CONTEXT) * size, size)
    return heads._replace(density=heads.density[own], number=heads.number[own])


def _all_heads(values: jax.Array) -> jax.Array:
    """[1, M, H / c] of each rank → [1, M, H]."""
    return jax.lax.all_gather(values, CONTEXT, axis=2, tiled=True)


def _of_slots(profile: Profile, ids: jax.Array, place: jax.Array, counted: jax.Array) -> Profile:
    """Values of the segments at these places, [1, M, ...]; zeros where they do not count."""
    segment = jnp.take_along_axis(ids, place, axis=1)
    counted = counted & (segment != PADDING)

    def of_slots(values: jax.Array) -> jax.Array:
        taken = jax.vmap(lambda value, slot: value[slot])(values, jnp.maximum(segment, 0))
        return jnp.where(counted.reshape(*counted.shape, *(1,) * (taken.ndim - 2)), taken, 0)

    return jax.tree.map(of_slots, profile)


@jax.custom_vjp
def _taken(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """Heads of x [R, S, H, ...] in an order. The gradient takes them back: no scatter."""
    return jnp.take(x, order, axis=2, unique_indices=True)


def _taken_forward(
    x: jax.Array, order: jax.Array, back: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _taken(x, order, back), (order, back)


def _taken_backward(
    saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, None, None]:
    order, back = saved
    return _taken(grad, back, order), None, None


_taken.defvjp(_taken_forward, _taken_backward)
