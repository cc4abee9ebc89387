"""Frozen parameters that checkpoints leave out because `run.initial_weights` gives them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.errors import InputError

BASE = "base"
"""The checkpoint's part that says which frozen parameters it leaves out."""


class Base(NamedTuple):
    """What a checkpoint says of the frozen parameters that it leaves out.

    Attributes:
      weights: where they are from: a folder or file, as `run.initial_weights`.
      seed: `run.seed`, which draws those that are not there.
      checksum: of their values, by `checksum`.
    """

    weights: str
    seed: int
    checksum: int

    def check(self, frozen: Any) -> None:
        """Checks frozen parameters that were read again.

        Raises:
          InputError: they are others than those of the checkpoint.
        """
        if checksum(frozen) != self.checksum:
            raise InputError(
                f"{self.weights}: these are other weights than those that the run was trained on; "
                "restore them, or name their folder (run.initial_weights in training, else --base)"
            )


def checksum(tree: Any) -> int:
    """Returns a sum of 32 bits over the bits and places of all values, whatever their sharding."""
    return int(sum(int(_sum(leaf)) * (2 * n + 1) for n, leaf in enumerate(jax.tree.leaves(tree)))
               % (1 << 32))  # fmt: skip


@jax.jit
def _sum(value: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    place = jnp.zeros(value.shape, jnp.uint32)
    for axis, size in enumerate(value.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, value.shape, axis)
    mixed = (bits.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)) * (2 * place + 1)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)
