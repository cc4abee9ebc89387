"""RMSNorm with rotary embedding, the public function: checks arguments, picks an implementation."""

import jax
from jax.sharding import NamedSharding

from pallas_kernels import devices
from pallas_kernels.rms_norm_rotary.implementations import REGISTRY
from pallas_kernels.rms_norm_rotary.operands import CallConfig, normalise


def rms_norm_rotary(
    x: jax.Array,
    weight: jax.Array,
    rotary: tuple[jax.Array, ...] | None = None,
    *,
    head_dim: int,
    bias: jax.Array | None = None,
    eps: float = 1e-6,
    implementation: str = "auto",
    interpret: bool = False,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """RMSNorm(x)·weight, split into heads, whose channel pairs are then rotated.

    What attention does with queries and keys after their projection (RMSNorm: arXiv 1910.07467;
    rotary embedding: arXiv 2104.09864). All of it is float32, and the result is rounded once.
    Differentiable once in x, weight and bias, in reverse mode.

    Args:
      x: [B, S, D], bfloat16, float16 or float32.
      weight: [D] for statistics over the whole width (Wan 2.1), or [head_dim] for statistics of
        each head (HunyuanVideo 1.5). Where D is head_dim both are the same.
      rotary: cos and sin of each token and channel pair (2i, 2i + 1), [S, head_dim // 2] or
        [B, S, head_dim // 2] each; they get no gradient. None for no rotation.
      head_dim: channels of a head.
      bias: [D] floats, the bias that x already holds of a linear layer; None for none. Its gradient
        is the sum of x's over all tokens, which the backward kernel adds up as well where it has
        registers for it. Where it was added to x, stop its gradient.
      eps: added to the mean square.
      implementation: "triton" (the kernels), "xla" (XLA's fusion), or "auto": whichever was
        measured as faster for this device, size, width, heads and dtype; XLA where nothing was
        measured.
      interpret: run the kernels ("auto" means "triton" then) in Pallas's interpreter, which is slow
        and needs no GPU.
      sharding: how x is split over a mesh whose axes are Auto, where tracing cannot see it. Its
        width may be split between heads, if each head has statistics of its own.

    Returns:
      [B, S, D // head_dim, head_dim] in x's dtype.

    Raises:
      TypeError: head_dim or eps is no plain number.
      ValueError: a shape, a dtype or eps does not fit, or the kernels cannot know how x is split.
      NotImplementedError: this device or this sharding cannot run the kernels.
    """
    operands, options = normalise(x, weight, bias, rotary, head_dim, eps, interpret)
    if sharding is None:
        sharding = devices.visible_sharding(x)
    elif sharding.mesh.size == 1:
        sharding = None
    config = CallConfig(options, sharding)
    name = "rms_norm_rotary"
    chosen = REGISTRY.choose(name, implementation, operands, config, interpret=interpret)
    return (chosen if x.size else REGISTRY.reference).run(operands, config)
