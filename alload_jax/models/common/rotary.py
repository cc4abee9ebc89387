"""Rotary position embedding over (t, h, w)."""

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.models.common.parts import ROTARY

RotaryTable = tuple[jax.Array, ...]
"""Cosines and sines, [S, head_dim // 2] or [R, S, head_dim // 2] float32 each."""


def grid_positions(frames: int, height: int, width: int) -> jax.Array:
    """Returns the positions of the tokens of one clip, in the order of `patchify`.

    Args:
      frames, height, width: size of the clip in tokens.

    Returns:
      [frames·height·width, 3] int32, the (t, h, w) of each token.
    """
    grid = jnp.indices((frames, height, width), dtype=jnp.int32)
    return grid.reshape(3, -1).T


def rotary_table(
    positions: jax.Array | np.ndarray,
    limits: tuple[int, int, int],
    head_dim: int,
    theta: float = 10_000.0,
    sizes: tuple[int, int, int] | None = None,
) -> RotaryTable:
    """Computes cosines and sines for every token and every pair of channels.

    Within each of the three parts of a head's channels, pairs rotate at the usual geometric
    frequencies (arXiv 2104.09864).
    Angles are computed in float64 in a small table per axis and looked up by position.

    Args:
      positions: [S, 3] integers from 0, or [R, S, 3] for different positions per row.
      limits: exclusive upper bounds of the positions, (t, h, w).
      head_dim: width of a head; even.
      theta: base of the frequencies.
      sizes: channels for (t, h, w), even, with the sum head_dim; None for Wan 2.1's: 2·(head_dim //
        6) each for h and w, the rest for t.

    Returns:
      cos, sin: [S, head_dim // 2] float32, or [R, S, head_dim // 2]; NaN where traced positions are
      outside the limits.

    Raises:
      ValueError: a position that is known is outside the limits.
    """
    if not isinstance(positions, jax.core.Tracer):
        _check_positions(np.asarray(positions), limits)
    spatial = 2 * (head_dim // 6)
    cosines: list[jax.Array] = []
    sines: list[jax.Array] = []
    for axis, size in enumerate(sizes or (head_dim - 2 * spatial, spatial, spatial)):
        frequencies = theta ** -(np.arange(0, size, 2, dtype=np.float64) / max(size, 1))
        angle = np.arange(limits[axis])[:, None] * frequencies
        place = jnp.asarray(positions)[..., axis]
        place = jnp.where(place < 0, limits[axis], place)  # a negative index counts from the end
        for part, values in ((cosines, np.cos(angle)), (sines, np.sin(angle))):
            table = jnp.asarray(values, jnp.float32)
            part.append(table.at[place].get(mode="fill", fill_value=jnp.nan))
    return jnp.concatenate(cosines, axis=-1), jnp.concatenate(sines, axis=-1)


def _check_positions(positions: np.ndarray, limits: tuple[int, int, int]) -> None:
    wrong = ((positions < 0) | (positions >= np.asarray(limits))).any(axis=-1)
    for place in positions[wrong][:1].tolist():
        raise ValueError(
            f"rotary_table: position {place} is outside (t, h, w) from 0 to below {list(limits)}; "
            "give the limits of the longest clip"
        )


@jax.named_scope(ROTARY)
def apply_rotary(x: jax.Array, table: RotaryTable) -> jax.Array:
    """Rotates neighbouring channel pairs (2i, 2i + 1) by the table's angles, in float32.

    Args:
      x: [B, S, num_heads, head_dim].
      table: cos and sin, [S, head_dim // 2] each, or [B, S, head_dim // 2].

    Returns:
      [B, S, num_heads, head_dim] in `x.dtype`.
    """
    cos, sin = (part[..., :, None, :] for part in table)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)
