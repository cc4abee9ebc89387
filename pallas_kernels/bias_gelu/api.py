"""A bias with GELU, the public function: checks arguments, picks an implementation."""

import jax
from jax.sharding import NamedSharding

from pallas_kernels import devices
from pallas_kernels.bias_gelu.implementation import Implementation
from pallas_kernels.bias_gelu.implementations import REGISTRY
from pallas_kernels.bias_gelu.operands import CallConfig, Operands, Options, check


def bias_gelu(
    x: jax.Array,
    bias: jax.Array,
    *,
    implementation: str = "auto",
    interpret: bool = False,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """GELU(x + bias) in its tanh form, between the two products of a feed-forward layer.

    GELU: arXiv 1606.08415. All of it is float32, gradients are summed in it, and results are
    rounded once. Differentiable in x and bias; the kernels once, in reverse mode.

    Args:
      x: [B, S, D], bfloat16, float16 or float32.
      bias: [D] floats.
      implementation: "triton" (the kernels), "xla" (XLA's fusion), or "auto": whichever was
        measured as faster for this device, size, width and dtype; XLA where nothing was measured.
      interpret: run the kernels ("auto" means "triton" then) in Pallas's interpreter, which is slow
        and needs no GPU.
      sharding: how x is split over a mesh whose axes are Auto, where tracing cannot see it. All of
        its dimensions may be split.

    Returns:
      x's shape and dtype.

    Raises:
      ValueError: a shape or a dtype does not fit, or the kernels cannot know how x is split.
      NotImplementedError: this device cannot run the kernels.
    """
    chosen, config = chosen_for(x, bias, implementation, interpret, sharding)
    return chosen.run(Operands(x, bias), config)


def chosen_for(
    x: jax.Array,
    bias: jax.Array,
    implementation: str,
    interpret: bool,
    sharding: NamedSharding | None,
) -> tuple[Implementation, CallConfig]:
    """The implementation of a call, and what is static in it; arguments and errors as there."""
    operands = Operands(x, bias)
    check(operands)
    if sharding is None:
        sharding = devices.visible_sharding(x)
    elif sharding.mesh.size == 1:
        sharding = None
    config = CallConfig(Options(interpret), sharding)
    chosen = REGISTRY.choose("bias_gelu", implementation, operands, config, interpret=interpret)
    return (chosen if x.size else REGISTRY.reference), config
