"""Small parts of layers: names, outputs, linear layers, one row in place of many, patches.

Names of parts are scopes (`jax.named_scope`) that `alload bench step --profile` and other profilers
find. An operation belongs to the innermost of them. They cost no time: instructions have them as
their names only. Names of outputs (`checkpoint_name`) are those by which rematerialisation policies
find what they keep.

With one row, XLA drops the axis of the batch and then uses a column-major layout for matrix
products and the norms around them: on an H200 the transposes took 2 % of a block at 65,536 tokens.
Split into row blocks, a single row is computed like any other batch; the split moves no data.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.sharding.mesh import row_shards

SELF_ATTENTION: Final = "self_attention"
CROSS_ATTENTION: Final = "cross_attention"
JOINT_ATTENTION: Final = "joint_attention"
FEED_FORWARD: Final = "feed_forward"
"""These four say where in a block an operation is. The following say what it computes."""

ATTENTION: Final = "attention_core"
"""Softmax and the products of queries, keys and values; the choice of blocks, where sparse."""
LINEAR: Final = "linear"
"""Linear layers: matrix products and biases."""
NORM: Final = "norm_modulation"
"""Norms with modulation, and the residual sums that the same kernel computes."""
QK_NORM: Final = "qk_norm"
"""RMSNorm of queries and keys, with their rotary embedding."""
ROTARY: Final = "rotary_embedding"
"""Rotary embedding of what has no such norm."""
ACTIVATION: Final = "activation"
RESIDUAL: Final = "residual_gate"
"""Residual sums with gates outside of the norms."""
EMBEDDING: Final = "embedding"
"""Embeddings of the inputs, and the refiner of texts."""
HEAD: Final = "head"
OBJECTIVE: Final = "objective"
"""Noise and loss."""
BLOCKS: Final = "blocks"
"""The scan over blocks."""
ACCUMULATION: Final = "gradient_accumulation"
OPTIMIZER: Final = "optimizer"
"""Clipping, optimizer, EMA."""

LINEAR_OUTPUT = "linear_output"
"""What linear layers of blocks compute: with their bias, where nothing else adds it, so that the
backward pass need not add it again."""
NORM_OUTPUT = "norm_output"
"""What norms and rotations of blocks compute, and activations other than GELU."""
FEED_FORWARD_OUTPUT = "feed_forward_output"
ATTENTION_OUTPUT = "attention_output"
"""Attention outputs and their softmax statistics."""
SHORT_ATTENTION_OUTPUT = "short_attention_output"
"""Likewise of cuDNN's attention of dense rows over fewer than `HOST_KEYS` keys."""
BLOCK_LISTS = "attention_block_lists"
"""The blocks that sparse attention has chosen, which every policy keeps: computed again, rounding
could choose others."""


Auxiliary = dict[str, jax.Array]
"""Named values that layers return beside their output, such as a loss or a statistic."""


class Output(NamedTuple):
    """The prediction of a forward pass.

    Attributes:
      velocity: velocity of the flow, float32, shaped like the input.
      auxiliary: values per sample, float32: [B, ...] for bucketed rows, [R, M, ...] for packed
        rows. The objective weights them like the sample losses and sums them over micro-batches,
        ranks and shape groups. Values whose names end in `_loss` are also minimised.
    """

    velocity: jax.Array
    auxiliary: Auxiliary


def by_sample(stacked: Auxiliary, sample_axes: int) -> Auxiliary:
    """Moves the layer axis, which a scan over layers stacks first, behind the sample axes.

    Args:
      stacked: values [layers, B, ...] or [layers, R, M, ...].
      sample_axes: number of sample axes: 1 for [B], 2 for [R, M].

    Returns:
      values [B, layers, ...] or [R, M, layers, ...].
    """
    return {name: jnp.moveaxis(value, 0, sample_axes) for name, value in stacked.items()}


class Linear(nnx.Linear):
    """`nnx.Linear`, whose product alone other kernels can take."""

    def product(self, inputs: jax.Array) -> jax.Array:
        """What the layer computes of [..., in] without its bias, [..., out]."""
        x, kernel = self.promote_dtype((inputs, self.kernel[...]), dtype=self.dtype)
        return self.dot_general(
            x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=self.precision
        )

    def bias_of(self, product: jax.Array) -> jax.Array:
        """The bias [out] in the dtype of a product."""
        assert self.bias is not None
        return jnp.asarray(self.bias[...], product.dtype)


def layer_norm(size: int, eps: float, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """An affine LayerNorm, whose variance is exact for large means too."""
    return nnx.LayerNorm(size, epsilon=eps, use_fast_variance=False, dtype=dtype, rngs=rngs)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: jax.Array, users: int) -> tuple[jax.Array, ...]:
    """x for each of its users.

    Where each gives a product as the gradient, cuBLAS adds to every product the sum of those
    before, as it writes it. XLA sees that if the sum stands second. In JAX's own order it leaves a
    pass over memory for three users.

    Args:
      x: any array.
      users: how many there are.
    """
    return (x,) * users


def _forward(x: jax.Array, users: int) -> tuple[tuple[jax.Array, ...], None]:
    return (x,) * users, None


def _backward(users: int, _: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    total = gradients[-1]
    for gradient in reversed(gradients[:-1]):
        total = gradient + total
    return (total,)


fan_out.defvjp(_forward, _backward)


_ROW_BLOCKS = 8


def split_single_row(
    function: Callable[..., jax.Array], sharding: NamedSharding | None, *arrays: jax.Array
) -> jax.Array:
    """Computes `function(*arrays)` with each array [B, S, ...] reshaped to [8·B, S / 8, ...].

    Arrays are reshaped only if each device has one row. The second axis of each array must be S.

    Args:
      function: maps arrays [B', S', ...] to [B', S', ...], each token independently.
      sharding: sharding of rows over a mesh; None on one device.
      arrays: [B, S, ...] with the same B and S, divisible by the mesh.
    """
    if not splits_single_row(arrays[0], sharding):
        return function(*arrays)
    rows, tokens = arrays[0].shape[:2]
    blocks = (x.reshape(rows * _ROW_BLOCKS, tokens // _ROW_BLOCKS, *x.shape[2:]) for x in arrays)
    result = function(*blocks)
    return result.reshape(rows, tokens, *result.shape[2:])


def splits_single_row(x: jax.Array, sharding: NamedSharding | None) -> bool:
    """Whether `split_single_row` reshapes arrays with the rows and tokens of x [B, S, ...]."""
    rows, tokens = x.shape[:2]
    return rows == row_shards(sharding) and tokens % _ROW_BLOCKS == 0


Array = TypeVar("Array", jax.Array, np.ndarray)


def patchify(latents: Array, patch: tuple[int, int, int]) -> Array:
    """Splits latents into patches, in (t, h, w) order.

    Args:
      latents: [B, frames, height, width, C], each size a multiple of its patch size.
      patch: (frames, height, width) of one patch.

    Returns:
      [B, S, patch volume · C].
    """
    batch, frames, height, width, channels = latents.shape
    pt, ph, pw = patch
    split = latents.reshape(
        batch, frames // pt, pt, height // ph, ph, width // pw, pw, channels
    ).transpose(0, 1, 3, 5, 2, 4, 6, 7)
    return split.reshape(batch, -1, pt * ph * pw * channels)


def unpatchify(tokens: Array, shape: tuple[int, ...], patch: tuple[int, int, int]) -> Array:
    """Inverts `patchify`.

    Args:
      tokens: [B, S, patch volume · C].
      shape: shape of the latents, (B, frames, height, width, C).
      patch: (frames, height, width) of one patch.

    Returns:
      [B, frames, height, width, C].
    """
    batch, frames, height, width, channels = shape
    pt, ph, pw = patch
    split = tokens.reshape(
        batch, frames // pt, height // ph, width // pw, pt, ph, pw, channels
    ).transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return split.reshape(shape)
