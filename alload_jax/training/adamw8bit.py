"""Adam's moments in eight bits, quantised in blocks (arXiv 2110.02861).

A block of up to 256 values shares a float32 scale, its largest magnitude. A value is stored as the
number of the nearest code of a fixed table whose codes lie closer together near zero ("dynamic
quantisation"). Blocks run along the inputs of a matrix, the axis that the partition rules leave
whole, so that quantisation needs no communication under FSDP.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BLOCK = 256
"""The most values that share a scale, as in bitsandbytes."""
SMALLEST = 4096
"""Parameters of fewer values keep float32 moments, as in bitsandbytes."""
_DECADES = 7
"""Powers of ten that the codes cover below a block's largest magnitude."""


def dynamic_codes(signed: bool) -> np.ndarray:
    """The 256 codes of dynamic quantisation in rising order, [256] float32 within −1 to 1.

    The decade up to 10⁻ᵏ is divided into half as many intervals as the one above it, and a code is
    the middle of an interval; 0 and 1 are codes too. Unsigned codes spend the sign's bit on twice
    as many intervals.
    """
    positive: list[np.ndarray] = []
    for place in range(_DECADES):
        intervals = 2**place if signed else 2 ** (place + 1)
        ends = np.linspace(0.1, 1.0, intervals + 1)
        positive.append((ends[:-1] + ends[1:]) / 2 * 10.0 ** (place - _DECADES + 1))
    values = np.concatenate(positive)
    sides = [-values, values] if signed else [values]
    return np.sort(np.concatenate([*sides, [0.0, 1.0]])).astype(np.float32)


_SIGNED, _UNSIGNED = dynamic_codes(True), dynamic_codes(False)


class Quantised(NamedTuple):
    """An array in eight bits.

    Attributes:
      codes: [..., N, M] uint8, shaped like the array.
      scale: [..., ceil(N / 256), M] float32, the largest magnitude of each block along N.
    """

    codes: jax.Array
    scale: jax.Array


def quantise(values: jax.Array, signed: bool) -> Quantised:
    """Quantises an array [..., N, M] in blocks along N.

    Unsigned values above zero never become zero: a second moment of zero would let the update grow
    without bound.
    """
    table = _SIGNED if signed else _UNSIGNED
    blocks = _to_blocks(values)
    scale = jnp.max(jnp.abs(blocks), axis=-2, keepdims=True)
    relative = blocks / jnp.where(scale > 0, scale, 1.0)
    middles = jnp.asarray((table[:-1] + table[1:]) / 2)
    codes = jnp.searchsorted(middles, relative, method="scan_unrolled")
    if not signed:
        codes = jnp.where((blocks > 0) & (codes == 0), 1, codes)
    codes = _from_blocks(codes.astype(jnp.uint8), values.shape[-2])
    return Quantised(codes, jnp.squeeze(scale, -2))


def dequantise(found: Quantised, signed: bool) -> jax.Array:
    """The float32 values of a quantised array."""
    table = jnp.asarray(_SIGNED if signed else _UNSIGNED)
    blocks = table[_to_blocks(found.codes)] * found.scale[..., None, :]
    return _from_blocks(blocks, found.codes.shape[-2])


def _to_blocks(values: jax.Array) -> jax.Array:
    """[..., N, M] → [..., blocks, values of a block, M], with zeros at the end."""
    *lead, rows, columns = values.shape
    size = min(BLOCK, rows)
    missing = -rows % size
    padded = jnp.pad(values, [(0, 0)] * len(lead) + [(0, missing), (0, 0)])
    return padded.reshape(*lead, (rows + missing) // size, size, columns)


def _from_blocks(blocks: jax.Array, rows: int) -> jax.Array:
    """The inverse of `_to_blocks` for arrays [..., rows, M]."""
    *lead, count, size, columns = blocks.shape
    return blocks.reshape(*lead, count * size, columns)[..., :rows, :]


class Adam8bitState(NamedTuple):
    """State of `scale_by_adam8bit`; trees are like the parameters.

    Attributes:
      steps: int32 scalar, number of updates.
      mu, mu_scale: codes and scales of the first moment.
      nu, nu_scale: codes and scales of the second moment.
    """

    steps: jax.Array
    mu: Any
    mu_scale: Any
    nu: Any
    nu_scale: Any


def scale_by_adam8bit(beta1: float, beta2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with quantised moments, for matrices and stacks of them.

    An update is computed from float32 moments, which are quantised for the next one.
    """

    def init(params: Any) -> Adam8bitState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return _stored(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Adam8bitState]:
        del params
        count = optax.safe_increment(state.steps)
        mu = jax.tree.map(
            lambda g, *stored: (
                beta1 * dequantise(Quantised(*stored), signed=True) + (1 - beta1) * g
            ),
            updates,
            state.mu,
            state.mu_scale,
        )
        nu = jax.tree.map(
            lambda g, *stored: (
                beta2 * dequantise(Quantised(*stored), signed=False) + (1 - beta2) * g * g
            ),
            updates,
            state.nu,
            state.nu_scale,
        )
        mu_hat = optax.tree.bias_correction(mu, beta1, count)
        nu_hat = optax.tree.bias_correction(nu, beta2, count)
        found = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
        return found, _stored(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _stored(count: jax.Array, mu: Any, nu: Any) -> Adam8bitState:
    first = jax.tree.map(lambda value: quantise(value, signed=True), mu)
    second = jax.tree.map(lambda value: quantise(value, signed=False), nu)

    def part(tree: Any, number: int) -> Any:
        return jax.tree.map(
            lambda one: one[number], tree, is_leaf=lambda one: isinstance(one, Quantised)
        )

    return Adam8bitState(count, part(first, 0), part(first, 1), part(second, 0), part(second, 1))
