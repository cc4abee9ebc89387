"""A bias with GELU and the function that takes its output, which is not kept for the backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels.bias_gelu.api import chosen_for
from pallas_kernels.bias_gelu.implementation import Implementation
from pallas_kernels.bias_gelu.operands import CallConfig, Operands

Function = Callable[[jax.Array, Any], jax.Array]


def bias_gelu_then(
    x: jax.Array,
    bias: jax.Array,
    function: Function,
    parameters: Any,
    *,
    implementation: str = "auto",
    interpret: bool = False,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """function(GELU(x + bias), parameters), for the second linear layer of a feed-forward layer.

    The parameters' gradient needs the output of GELU. The kernel of the backward pass computes it
    again beside the gradient of x, from x, which it reads anyway: keeping it would take memory, and
    computing it apart would read x twice. Differentiable in reverse mode.

    Args:
      x, bias, implementation, interpret, sharding: as of `bias_gelu`.
      function: (like x, parameters) → array. Affine in its first argument, and all arrays that it
        depends on are its arguments.
      parameters: a pytree of arrays.

    Returns:
      What the function does.

    Raises:
      ValueError, NotImplementedError: as `bias_gelu`.
    """
    chosen, config = chosen_for(x, bias, implementation, interpret, sharding)
    return _then(chosen, config, function, Operands(x, bias), parameters)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _then(
    implementation: Implementation,
    config: CallConfig,
    function: Function,
    operands: Operands,
    parameters: Any,
) -> jax.Array:
    return function(implementation.run(operands, config), parameters)


def _forward(
    implementation: Implementation,
    config: CallConfig,
    function: Function,
    operands: Operands,
    parameters: Any,
) -> tuple[jax.Array, tuple[Operands, Any]]:
    out = function(implementation.run(operands, config), parameters)
    return out, (operands, parameters)


def _backward(
    implementation: Implementation,
    config: CallConfig,
    function: Function,
    residuals: tuple[Operands, Any],
    cotangent: jax.Array,
) -> tuple[Operands, Any]:
    operands, parameters = residuals
    # Where the function is affine its gradient is the same at any point.
    _, pull = jax.vjp(lambda each: function(each, parameters), jnp.zeros_like(operands.x))
    (gained,) = pull(cotangent)
    again = implementation.backward_with_output(operands, gained, config)
    _, pull = jax.vjp(lambda each: function(again.out, each), parameters)
    (gradients,) = pull(cotangent)
    return Operands(again.dx, again.dbias), gradients


_then.defvjp(_forward, _backward)
