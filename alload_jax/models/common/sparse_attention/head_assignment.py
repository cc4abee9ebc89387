"""Which heads each rank of a context group computes, so that no rank waits for denser ones."""

import jax
import jax.numpy as jnp


def balanced_order(cost: jax.Array, ranks: int) -> jax.Array:
    """Orders heads so that equal consecutive parts of them have about the same total cost.

    Longest processing time first: the most costly head left goes to the rank with the least cost
    so far that has room, as each rank has the same number of heads (DSV, arXiv 2502.07590,
    section 5).

    Args:
      cost: [H] float32, at least 0.
      ranks: number of parts; it divides H.

    Returns:
      [H] int32, the heads of the first rank, then those of the second, and so on.
    """
    heads = len(cost)
    room = heads // ranks
    falling = jnp.argsort(-cost, stable=True).astype(jnp.int32)

    def give(
        place: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        order, load, count = state
        head = falling[place]
        rank = jnp.argmin(jnp.where(count < room, load, jnp.inf))
        order = order.at[rank * room + count[rank]].set(head)
        return order, load.at[rank].add(cost[head]), count.at[rank].add(1)

    none = jnp.zeros(ranks, jnp.int32)
    start = (jnp.zeros(heads, jnp.int32), jnp.zeros(ranks, jnp.float32), none)
    return jax.lax.fori_loop(0, heads, give, start)[0]
