"""A bias with GELU, alone and before a product: its meaning, implementations and functions."""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from typing_extensions import override

from pallas_kernels import devices
from pallas_kernels.first_use import ELEMENTS, compared
from pallas_kernels.op import (
    Call,
    Implementation,
    Kernels,
    MosaicKernels,
    Plain,
    Reference,
    Registry,
    backward_on_shards,
    call_of,
    check_floats,
    check_tokens,
    placed,
)

_NAME = "bias_gelu"


class GeluOperands(NamedTuple):
    """Arrays of one call.

    Attributes:
      x: [B, S, D] bfloat16, float16 or float32.
      bias: [D] floats.
    """

    x: jax.Array
    bias: jax.Array


class Again(NamedTuple):
    """What the backward pass computes where the output is not kept.

    Attributes:
      out: the output, like x.
      dx: gradient of x, in its dtype.
      dbias: gradient of the bias, in its dtype.
    """

    out: jax.Array
    dx: jax.Array
    dbias: jax.Array


class GeluImplementation(Implementation[GeluOperands, Plain]):
    """A way to compute the function, chosen by name."""

    @abstractmethod
    def backward_with_output(
        self, operands: GeluOperands, cotangent: jax.Array, call: Call[Plain]
    ) -> Again:
        """The output once more, and the gradients for its cotangent, like x."""


class GeluReference(Reference[GeluOperands, Plain], GeluImplementation):
    """`reference`; it keeps its operands for the backward pass, and no float32 values."""

    def __init__(self) -> None:
        # XLA may compute it once where it sees both passes, which a barrier would forbid.
        kept = jax.checkpoint(reference, prevent_cse=False)
        super().__init__(lambda operands, options: kept(operands))

    @override
    def backward_with_output(
        self, operands: GeluOperands, cotangent: jax.Array, call: Call[Plain]
    ) -> Again:
        """By differentiating the reference, of which XLA can make one pass."""
        out, pull = jax.vjp(reference, operands)
        (gradients,) = pull(cotangent)
        return Again(out, *gradients)


def reference(operands: GeluOperands) -> jax.Array:
    """GELU of the sum, float32 inside: z·sigmoid(√(8/π)·(z + 0.044715·z³)), in x's dtype."""
    x, bias = operands
    z = x.astype(jnp.float32) + bias.astype(jnp.float32)
    return (z * _gate(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3))).astype(x.dtype)


@jax.custom_jvp
def _gate(x: jax.Array) -> jax.Array:
    """The sigmoid. Its slope is not taken from 1 − sigmoid(x), which has few digits near 0."""
    return jax.nn.sigmoid(x)


_gate.defjvps(lambda tangent, value, x: tangent * value * _gate(-x))


# ---------------------------------------------------------------- for kernels

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR
"""GELU(z) = z·sigmoid(_LINEAR·z + _CUBIC·z³), which is its tanh form."""
_BASE_2 = 1 / math.log(2)
"""exp(u) = exp2(_BASE_2·u)."""

Power = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""p = 2^exponent and 1 / (1 + p), of an exponent that is not above 0."""


def gelu(z: jax.Array, power: Power) -> jax.Array:
    """GELU of float32."""
    return z * _gates(z, power)[0]


def gelu_and_slope(z: jax.Array, power: Power) -> tuple[jax.Array, jax.Array]:
    """GELU and its derivative, of float32."""
    gate, slope = _gates(z, power)
    return z * gate, gate + slope * (z * (_LINEAR + 3 * _CUBIC * (z * z)))


def _gates(z: jax.Array, power_of: Power) -> tuple[jax.Array, jax.Array]:
    """GELU(z) / z, the sigmoid's value, and its slope.

    By the exponential of what is not above 0, so that neither overflows nor cancels.
    """
    argument = z * (_BASE_2 * _LINEAR + _BASE_2 * _CUBIC * (z * z))
    power, upper = power_of(-jnp.abs(argument))
    lower = power * upper
    return jnp.where(argument >= 0, upper, lower), upper * lower


# ---------------------------------------------------------------- implementations

_LEAST_ELEMENTS = 1 << 22
_NARROWEST, _ITEMSIZE = 1024, 2
"""Where the kernels were measured on an NVIDIA H200: benchmarks/results/bias_gelu_h200.json."""


def measured_as_faster(device_kind: str, elements: int, dim: int, itemsize: int) -> bool | None:
    """Whether the kernels were measured as faster on a device; None if unknown.

    Args:
      device_kind: of the device to run on.
      elements, dim: of x on one device.
      itemsize: bytes of an element of x.
    """
    if elements < _LEAST_ELEMENTS:
        return False
    measured = dim >= _NARROWEST and itemsize == _ITEMSIZE
    return True if measured and device_kind.startswith(devices.HOPPER) else None


class GeluKernels(Kernels[GeluOperands, Plain], GeluImplementation):
    """The Triton kernels, on NVIDIA GPUs."""

    function = _NAME
    module = "pallas_kernels.bias_gelu.triton"

    @override
    def specs(self, operands: GeluOperands, call: Call[Plain]) -> tuple[PyTree, P]:
        spec = () if call.sharding is None else tuple(call.sharding.spec)
        batch, sequence, width, *_ = (*spec, None, None, None)
        of_x = P(batch, sequence, width)
        return GeluOperands._make((of_x, P(width))), of_x

    @override
    def measured(self, operands: GeluOperands, call: Call[Plain]) -> bool | None:
        x = operands.x
        elements, width = devices.elements_of_shard(x, call.sharding)
        return measured_as_faster(devices.device_kind(), elements, width, x.dtype.itemsize)

    @override
    def case(self, operands: GeluOperands, call: Call[Plain]) -> str:
        return f"{devices.elements_of_shard(operands.x, call.sharding)[1]} {operands.x.dtype}"

    @override
    def seconds(self, operands: GeluOperands, call: Call[Plain]) -> tuple[float, float]:
        width = devices.elements_of_shard(operands.x, call.sharding)[1]
        x = jax.ShapeDtypeStruct((1, max(1, ELEMENTS // width), width), operands.x.dtype)
        arguments = (x, jax.ShapeDtypeStruct((width,), jnp.float32))
        runs = (REGISTRY.reference.run, self.run)
        return compared(runs, GeluOperands, Call(Plain(), None), arguments)

    @override
    def backward_with_output(
        self, operands: GeluOperands, cotangent: jax.Array, call: Call[Plain]
    ) -> Again:
        """One pass over memory on each shard."""
        specs, out = self.specs(operands, call)
        operands = placed(operands, specs, call.sharding)
        backward = partial(import_module(self.module).backward, with_output=True)
        dx, dbias, again = backward_on_shards(self, call, backward, operands, cotangent, out)
        return Again(again, dx, dbias.astype(operands.bias.dtype))


class MosaicGelu(MosaicKernels[GeluOperands, Plain], GeluKernels):
    """The Mosaic kernels, on Hopper, of widths that are multiples of 128."""

    module = "pallas_kernels.bias_gelu.mosaic"


REGISTRY: Registry[GeluImplementation] = Registry(reference=GeluReference())
REGISTRY.register(GeluKernels())
REGISTRY.register(MosaicGelu())


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
    chosen, operands, call = _chosen(x, bias, implementation, interpret, sharding)
    return chosen.run(operands, call)


def _chosen(
    x: jax.Array,
    bias: jax.Array,
    implementation: str,
    interpret: bool,
    sharding: NamedSharding | None,
) -> tuple[GeluImplementation, GeluOperands, Call[Plain]]:
    """The implementation of a call, its operands and what is static in it; errors as there."""
    check_tokens(_NAME, x)
    check_floats(_NAME, "bias", bias, x.shape[-1:])
    operands, call = GeluOperands(x, bias), call_of(x, Plain(interpret), sharding)
    chosen = REGISTRY.choose(_NAME, implementation, operands, call, interpret=interpret)
    return (chosen if x.size else REGISTRY.reference), operands, call


def bias_gelu_then(
    x: jax.Array,
    bias: jax.Array,
    function: Callable[[jax.Array, PyTree], jax.Array],
    parameters: PyTree,
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
    chosen, operands, call = _chosen(x, bias, implementation, interpret, sharding)

    @jax.custom_vjp
    def then(operands: GeluOperands, parameters: PyTree) -> jax.Array:
        return function(chosen.run(operands, call), parameters)

    def forward(operands: GeluOperands, parameters: PyTree) -> tuple[jax.Array, PyTree]:
        return function(chosen.run(operands, call), parameters), (operands, parameters)

    def backward(residuals: PyTree, cotangent: jax.Array) -> tuple[GeluOperands, PyTree]:
        operands, parameters = residuals
        # Where the function is affine its gradient is the same at any point.
        _, pull = jax.vjp(lambda each: function(each, parameters), jnp.zeros_like(operands.x))
        (gradient,) = pull(cotangent)
        again = chosen.backward_with_output(operands, gradient, call)
        _, pull = jax.vjp(lambda each: function(again.out, each), parameters)
        return GeluOperands(again.dx, again.dbias), *pull(cotangent)

    then.defvjp(forward, backward)
    return then(operands, parameters)
