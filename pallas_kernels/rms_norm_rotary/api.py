"""RMSNorm with rotary embedding: what it means, its implementations, and the public function."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from typing_extensions import override

from pallas_kernels import devices
from pallas_kernels.first_use import ELEMENTS, compared
from pallas_kernels.op import (
    Call,
    Implementation,
    Kernels,
    MosaicKernels,
    Reference,
    Registry,
    call_of,
    check_floats,
    check_tokens,
)
from pallas_kernels.walks import LANES, Pace, Way, way_of

_NAME = "rms_norm_rotary"


class RmsNormOperands(NamedTuple):
    """Arrays of one call.

    Attributes:
      x: [B, S, D] bfloat16, float16 or float32.
      weight: [D], or [head_dim] where each head has statistics of its own.
      bias: [D], which x holds already and which gets the sum of x's gradients; None for none.
      cos: [S, head_dim // 2] or [B, S, head_dim // 2] float32; None for no rotation.
      sin: like `cos`.
    """

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None


@dataclass(frozen=True)
class RmsNormOptions:
    """What is static in a call on one device.

    Attributes:
      head_dim: channels of a head.
      per_head: whether each head has statistics of its own, rather than the whole width.
      eps: added to the mean square.
      interpret: run kernels in an interpreter, which needs no GPU.
    """

    head_dim: int
    per_head: bool
    eps: float
    interpret: bool = False


def heads_shape(x: jax.Array, options: RmsNormOptions) -> tuple[int, ...]:
    """[B, S, D // head_dim, head_dim]."""
    return (*x.shape[:-1], x.shape[-1] // options.head_dim, options.head_dim)


def reference(operands: RmsNormOperands, options: RmsNormOptions) -> jax.Array:
    """RMSNorm of x, then its rotation, float32 inside: [B, S, H, head_dim] in x's dtype."""
    wide = operands.x.astype(jnp.float32)
    # Of the float32 gradients, before these are rounded to x's dtype.
    wide = wide if operands.bias is None else _holding(wide, operands.bias)
    heads = heads_shape(wide, options)
    wide = wide.reshape(heads) if options.per_head else wide
    mean = jnp.square(wide).mean(axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean + options.eps) * operands.weight.astype(jnp.float32)
    normed = normed.reshape(heads)
    if operands.cos is not None and operands.sin is not None:
        # Channel pairs (2i, 2i + 1) turned by angle i.
        cos, sin = operands.cos[..., None, :], operands.sin[..., None, :]
        pairs = normed.reshape(*heads[:-1], heads[-1] // 2, 2)
        even, odd = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
        normed = turned.reshape(heads)
    return normed.astype(operands.x.dtype)


@jax.custom_vjp
def _holding(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x, float32, whose gradients the bias gets as well."""
    return x


def _forward(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.zeros((0,), bias.dtype)


def _backward(like: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    summed = gradient.sum(axis=tuple(range(gradient.ndim - 1)))
    return gradient, summed.astype(like.dtype)


_holding.defvjp(_forward, _backward)


_LEAST_ELEMENTS = 256 * 1536
_WIDTHS, _HEADS, _ITEMSIZE = (1024, 8192), (64, 128), 2
"""Where kernels were measured on an NVIDIA H200: benchmarks/results/rms_norm_rotary_h200.json."""


def measured_as_faster(
    device_kind: str, elements: int, dim: int, head_dim: int, itemsize: int
) -> bool | None:
    """Whether the kernels were measured as faster on a device; None if unknown.

    Args:
      device_kind: of the device to run on.
      elements, dim: of x on one device.
      head_dim: channels of a head.
      itemsize: bytes of an element of x.
    """
    if elements < _LEAST_ELEMENTS:
        return False
    measured = _WIDTHS[0] <= dim <= _WIDTHS[1] and head_dim in _HEADS and itemsize == _ITEMSIZE
    return True if measured and device_kind.startswith(devices.HOPPER) else None


class RmsNormKernels(Kernels[RmsNormOperands, RmsNormOptions]):
    """The Triton kernels, on NVIDIA GPUs."""

    function = _NAME
    module = "pallas_kernels.rms_norm_rotary.triton"
    vectors = 2

    @override
    def specs(
        self, operands: RmsNormOperands, call: Call[RmsNormOptions]
    ) -> tuple[RmsNormOperands, P]:
        spec = () if call.sharding is None else tuple(call.sharding.spec)
        batch, sequence, width, *_ = (*spec, None, None, None)
        shared = operands.cos is not None and operands.cos.ndim == 2
        table = P(sequence, None) if shared else P(batch, sequence, None)
        specs = (P(batch, sequence, width), P(None), P(width), table, table)
        return RmsNormOperands._make(specs), P(batch, sequence, width, None)

    @override
    def unsupported_call(
        self, operands: RmsNormOperands, call: Call[RmsNormOptions]
    ) -> Exception | None:
        """An odd head, or a split other than between heads that have statistics each."""
        x, head_dim = operands.x, call.options.head_dim
        if head_dim & (head_dim - 1) or head_dim < 2:
            return NotImplementedError(
                f"head_dim={head_dim} is not a power of two from 2 on; use 'xla' or 'auto'"
            )
        advice = ", and a token's statistics need all of it; split batch or sequence, or use 'xla'"
        whole = {} if call.options.per_head else {2: ("width is", advice)}
        sizes = (*x.shape[:2], x.shape[2] // head_dim)
        return devices.unsupported_sharding(x, call.sharding, whole=whole, sizes=sizes)

    @override
    def measured(self, operands: RmsNormOperands, call: Call[RmsNormOptions]) -> bool | None:
        x, head_dim = operands.x, call.options.head_dim
        elements, width = devices.elements_of_shard(x, call.sharding)
        kind = devices.device_kind()
        return measured_as_faster(kind, elements, width, head_dim, x.dtype.itemsize)

    @override
    def case(self, operands: RmsNormOperands, call: Call[RmsNormOptions]) -> str:
        width = devices.elements_of_shard(operands.x, call.sharding)[1]
        case = f"{width} {call.options.head_dim} {operands.x.dtype}"
        return case + " per head" * call.options.per_head + " rotated" * (operands.cos is not None)

    @override
    def seconds(self, operands: RmsNormOperands, call: Call[RmsNormOptions]) -> tuple[float, float]:
        width, options = devices.elements_of_shard(operands.x, call.sharding)[1], call.options
        tokens = max(1, ELEMENTS // width)
        angle = jnp.arange(tokens * (options.head_dim // 2), dtype=jnp.float32).reshape(tokens, -1)
        cos, sin = (jnp.cos(angle), jnp.sin(angle)) if operands.cos is not None else (None, None)
        arguments = (
            jax.ShapeDtypeStruct((1, tokens, width), operands.x.dtype),
            jax.ShapeDtypeStruct((options.head_dim if options.per_head else width,), jnp.float32),
        )
        runs = REGISTRY.reference.run, self.run
        with_table = partial(RmsNormOperands, cos=cos, sin=sin)
        return compared(runs, with_table, Call(options, None), arguments)


# ---------------------------------------------------------------- Mosaic

FORWARD_PACE, BACKWARD_PACE = Pace(16, 4, 42_000), Pace(16, 4, 42_000)
_MOST_GROUPS = 8
"""Of a program."""
_MOSAIC_FROM, _MOSAIC_TO = 1024, 8192
_MOSAIC_PER_HEAD = 2048
"""Widths between which the Mosaic kernels' two passes together were faster than Triton's on an
H200, with statistics of the whole width and heads of 128, and the one that was measured with those
of heads, where the forward alone was slower: benchmarks/results/kernels_h200.json."""


def way_for(dim: int, options: RmsNormOptions, streams: int, pace: Pace) -> Way | None:
    """For tokens of `dim` channels; None for those that the kernels do not take.

    Groups share a token's chunks evenly and in pairs; in fours where each head has statistics of
    its own, and each warp then a head.

    Args:
      dim: of x.
      options: of the call.
      streams: bytes of a channel that are read.
      pace: of the kernel.
    """
    of_head = (128,) if options.per_head else (64, 128)
    if dim % LANES or options.head_dim not in of_head:
        return None
    together, total = 4 if options.per_head else 2, dim // LANES
    for groups in range(-(-total // pace.chunks), _MOST_GROUPS + 1):
        if total % (together * groups) == 0:
            return way_of(dim, streams, pace, groups)
    return None


class MosaicRmsNorm(MosaicKernels[RmsNormOperands, RmsNormOptions], RmsNormKernels):
    """The Mosaic kernels, on Hopper, of heads of 64 or 128 channels."""

    module = "pallas_kernels.rms_norm_rotary.mosaic"

    @override
    def unsupported_lowering(self, x: jax.Array, call: Call[RmsNormOptions]) -> Exception | None:
        """Another device or JAX, or channels that groups of threads cannot share in pairs."""
        if reason := super().unsupported_lowering(x, call):
            return reason
        width = devices.elements_of_shard(x, call.sharding)[1]
        if way_for(width, call.options, 2 * x.dtype.itemsize, BACKWARD_PACE) is None:
            heads = f"{width} channels in heads of {call.options.head_dim}"
            return ValueError(f"its groups of threads cannot share {heads}")
        return None

    @override
    def faster_than_triton(self, operands: RmsNormOperands, call: Call[RmsNormOptions]) -> bool:
        """As measured."""
        options, x = call.options, operands.x
        heads, dim = options.head_dim == 128 and operands.cos is not None, x.shape[-1]
        measured = _MOSAIC_FROM <= dim <= _MOSAIC_TO
        if options.per_head:
            measured = dim == _MOSAIC_PER_HEAD
        return heads and x.dtype.itemsize == _ITEMSIZE and measured


REGISTRY: Registry[Implementation[RmsNormOperands, RmsNormOptions]] = Registry(
    reference=Reference(reference)
)
REGISTRY.register(RmsNormKernels())
REGISTRY.register(MosaicRmsNorm())


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
    check_tokens(_NAME, x)
    dim = x.shape[-1]
    if type(head_dim) is not int or type(eps) is not float:
        raise TypeError(
            f"{_NAME}: head_dim is {head_dim!r} and eps {eps!r}; they must be an int and a float"
        )
    if not np.float32(eps) > 0:
        raise ValueError(f"{_NAME}: eps={eps} is not above 0 in float32")
    if head_dim < 1 or dim % head_dim:
        raise ValueError(f"{_NAME}: head_dim={head_dim} does not divide D={dim}, the width of x")
    if weight.shape not in ((dim,), (head_dim,)) or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"{_NAME}: weight is {weight.dtype}{list(weight.shape)}; it must be floats [{dim}], or "
            f"[{head_dim}] for statistics of each head"
        )
    if bias is not None:
        check_floats(_NAME, "bias", bias, (dim,))
    cos = sin = None
    if rotary is not None:
        if head_dim % 2:
            raise ValueError(f"{_NAME}: head_dim={head_dim} is odd; channels rotate in pairs")
        one, own = (x.shape[1], head_dim // 2), (len(x), x.shape[1], head_dim // 2)
        shapes = [jnp.shape(part) for part in rotary]
        if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0] not in (one, own):
            raise ValueError(
                f"{_NAME}: rotary has the shapes {[list(shape) for shape in shapes]}; it must be "
                f"cos and sin of {list(one)}, or of {list(own)}"
            )
        # No implementation has a gradient for them, so that none depends on the choice.
        cos, sin = (jax.lax.stop_gradient(jnp.asarray(part, jnp.float32)) for part in rotary)
    operands = RmsNormOperands(x, weight, bias, cos, sin)
    options = RmsNormOptions(head_dim, weight.shape != (dim,), eps, interpret)
    call = call_of(x, options, sharding)
    chosen = REGISTRY.choose(_NAME, implementation, operands, call, interpret=interpret)
    return (chosen if x.size else REGISTRY.reference).run(operands, call)
