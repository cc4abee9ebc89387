"""One frame for kernels: a call, its implementations by name, and the choice among them.

A kernel has a reference in plain jax.numpy, and `Kernels`: a forward and a backward on one device's
arrays become one differentiable function of arrays that a mesh splits. The custom VJP stands
outside, and forward and backward each run inside a `shard_map` of their own: under a mesh whose
axes are Auto, XLA would otherwise gather every operand of a kernel that it cannot look into. One
`psum` adds the gradients of a vector over the shards that share it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from typing_extensions import override

from pallas_kernels import devices
from pallas_kernels.devices import mesh_axes
from pallas_kernels.first_use import COMPARISONS
from pallas_kernels.walks import LANES

AUTO = "auto"
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
"""Of x."""


class Interpretable(Protocol):
    """Options of a function; hashable."""

    @property
    def interpret(self) -> bool:
        """Whether kernels run in an interpreter, which needs no GPU."""


Options = TypeVar("Options", bound=Interpretable)
Operands = TypeVar("Operands", bound=tuple[PyTree, ...])
Function = Callable[..., PyTree]
"""Of arrays."""
Ref = Any
"""A reference to an array within a kernel, for whose kinds JAX and Pallas share no type."""


@dataclass(frozen=True)
class Call(Generic[Options]):
    """What is static in a call.

    Attributes:
      options: of the function.
      sharding: of the first operand; None on one device, or inside `shard_map`.
    """

    options: Options
    sharding: NamedSharding | None


@dataclass(frozen=True)
class Plain:
    """Options of a function that has none.

    Attributes:
      interpret: run kernels in an interpreter, which needs no GPU.
    """

    interpret: bool = False


def call_of(x: jax.Array, options: Options, sharding: NamedSharding | None) -> Call[Options]:
    """A call whose x is split as given, or as an Explicit mesh shows it."""
    if sharding is None:
        return Call(options, devices.visible_sharding(x))
    return Call(options, sharding if sharding.mesh.size > 1 else None)


def check_tokens(function: str, x: jax.Array) -> None:
    """Checks that x is [B, S, D] of a dtype that kernels take.

    Raises:
      ValueError: it is not; the message begins with the function's name.
    """
    if x.ndim != 3 or x.dtype not in DTYPES:
        raise ValueError(
            f"{function}: x is {x.dtype}{list(x.shape)}; it must be [B, S, D] of bfloat16, float16 "
            "or float32"
        )


def check_floats(function: str, name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    """Checks that an array holds floats of a shape.

    Raises:
      ValueError: it does not; the message names it.
    """
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{function}: {name} is {x.dtype}{list(x.shape)}; it must be floats {list(shape)}"
        )


class Implementation(ABC, Generic[Operands, Options]):
    """A way to compute a function, chosen by name.

    Attributes:
      name: by which users choose it.
      interpretable: whether it runs with `interpret=True`, without the device that it is for.
    """

    name: str
    interpretable: bool = False

    @abstractmethod
    def run(self, operands: Operands, call: Call[Options]) -> PyTree:
        """The function's results, differentiable in its floats."""

    def unsupported_reason(self, operands: Operands, call: Call[Options]) -> Exception | None:
        """Why it cannot take a call, as the error to raise; None if it can.

        The error ends a sentence: NotImplementedError says what this device or sharding lacks,
        ValueError which argument to change.
        """
        del operands, call
        return None

    def faster_than_reference(self, operands: Operands, call: Call[Options]) -> bool:
        """Whether it was measured as faster than the reference for such a call."""
        del operands, call
        return False


class Reference(Implementation[Operands, Options]):
    """A function in plain jax.numpy: for every device and sharding, fused and differentiated.

    Attributes:
      function: (operands, options) → results.
    """

    name = "xla"

    def __init__(self, function: Callable[[Operands, Options], PyTree]):
        self.function = function

    @override
    def run(self, operands: Operands, call: Call[Options]) -> PyTree:
        return self.function(operands, call.options)


T = TypeVar("T", bound=Implementation)


class Registry(Generic[T]):
    """The implementations of one kernel.

    Attributes:
      reference: takes every call; "auto" chooses it where nothing was measured as faster.
    """

    def __init__(self, reference: T):
        self.reference = reference
        self._others: dict[str, T] = {}

    def __iter__(self) -> Iterator[T]:
        """In order of registration, the reference last."""
        yield from (*self._others.values(), self.reference)

    def names(self) -> tuple[str, ...]:
        """What users can choose from."""
        return (AUTO, *(each.name for each in self))

    def register(self, implementation: T) -> None:
        """Adds an implementation; "auto" prefers those that were registered later.

        Raises:
          ValueError: its name is taken.
        """
        if implementation.name in self.names():
            raise ValueError(f"the name {implementation.name!r} is taken; choose another")
        self._others[implementation.name] = implementation

    def unregister(self, name: str) -> None:
        """Removes what `register` added."""
        del self._others[name]

    def choose(self, function: str, name: str, *call: PyTree, interpret: bool = False) -> T:
        """The implementation to run.

        Args:
          function: that the user called, for messages.
          name: one of `names()`.
          call: what `unsupported_reason` and `faster_than_reference` take.
          interpret: only what can run in an interpreter will do.

        Raises:
          ValueError: the name is unknown, or an argument keeps it from running.
          NotImplementedError: what was asked for cannot run here.
        """
        if name not in self.names():
            raise ValueError(
                f"{function}: implementation={name!r} is unknown; "
                f"choose one of {', '.join(self.names())}"
            )
        if name == AUTO and not interpret:
            fastest = (
                each
                for each in reversed(self._others.values())
                if each.unsupported_reason(*call) is None and each.faster_than_reference(*call)
            )
            return next(fastest, self.reference)
        candidates = [each for each in self if name in (AUTO, each.name)]
        if interpret:
            candidates = [each for each in candidates if each.interpretable]
        if not candidates:
            raise ValueError(f"{function}: {name!r} has nothing to interpret; leave interpret out")
        reason = candidates[0].unsupported_reason(*call)
        if reason is not None:
            raise type(reason)(f"{function}: {candidates[0].name!r} cannot run, {reason}")
        return candidates[0]


class Measured(Implementation[Operands, Options]):
    """One that "auto" takes where it was measured as faster, or is so at first use.

    Attributes:
      function: its name, for messages.
    """

    function: str

    @abstractmethod
    def measured(self, operands: Operands, call: Call[Options]) -> bool | None:
        """Whether it was measured as faster than the reference; None if nothing was."""

    @abstractmethod
    def case(self, operands: Operands, call: Call[Options]) -> str:
        """What a comparison at first use is remembered by."""

    @abstractmethod
    def seconds(self, operands: Operands, call: Call[Options]) -> tuple[float, float]:
        """Of the reference and of this, for operands like these (`first_use.compared`)."""

    @override
    def faster_than_reference(self, operands: Operands, call: Call[Options]) -> bool:
        """As measured; where nothing was, as it is at first use."""
        known = self.measured(operands, call)
        if known is not None:
            return known
        return COMPARISONS.faster(
            f"{self.function} {self.case(operands, call)}", partial(self.seconds, operands, call)
        )


class Kernels(Measured[Operands, Options]):
    """Kernels of a function of tokens and vectors of parameters, through Triton.

    The operands are a named tuple of x [B, S, D], the vectors, and others without a gradient. The
    default of all but x and the first vector is None. Forward and backward take one device's
    arrays, and are functions of a module that is imported where they run: Pallas's Triton lowering
    is deprecated, and a JAX without it must still run the reference.

    Attributes:
      module: that has `forward` (operands, options) → the output, of operands that are not empty,
        and `backward` (operands, cotangent, options) → gradients of x, in its dtype, and of each
        vector that there is, float32.
      vectors: how many vectors there may be.
    """

    name = "triton"
    interpretable = True
    module: str
    vectors: ClassVar[int] = 1

    @abstractmethod
    def specs(self, operands: Operands, call: Call[Options]) -> tuple[PyTree, PartitionSpec]:
        """How the operands and the output are split."""

    def unsupported_call(self, operands: Operands, call: Call[Options]) -> Exception | None:
        """Why x cannot be computed shard by shard."""
        return devices.unsupported_sharding(operands[0], call.sharding)

    def unsupported_lowering(self, x: jax.Array, call: Call[Options]) -> Exception | None:
        """Another device or JAX, or a checking shard_map."""
        return devices.unsupported_triton(x, interpret=call.options.interpret)

    @override
    def unsupported_reason(self, operands: Operands, call: Call[Options]) -> Exception | None:
        """What `unsupported_call` and `unsupported_lowering` say."""
        return self.unsupported_call(operands, call) or self.unsupported_lowering(operands[0], call)

    @override
    def run(self, operands: Operands, call: Call[Options]) -> jax.Array:
        """Forward and backward under one custom VJP."""
        return _run(self, call, placed(operands, self.specs(operands, call)[0], call.sharding))


class MosaicKernels(Kernels[Operands, Options]):
    """Those through Mosaic GPU of a function that has Triton kernels as well, on Hopper."""

    name = "mosaic"
    interpretable = False

    @override
    def unsupported_lowering(self, x: jax.Array, call: Call[Options]) -> Exception | None:
        if (width := devices.elements_of_shard(x, call.sharding)[1]) % LANES:
            return ValueError(f"the width {width} is no multiple of {LANES}")
        return devices.unsupported_mosaic(x)

    def faster_than_triton(self, operands: Operands, call: Call[Options]) -> bool:
        """Whether they were measured as faster than the Triton kernels."""
        del operands, call
        return False

    @override
    def faster_than_reference(self, operands: Operands, call: Call[Options]) -> bool:
        """As the Triton kernels are, where these are faster or those are not lowered."""
        preferred = self.faster_than_triton(operands, call) or not devices.lowers_triton()
        return preferred and super().faster_than_reference(operands, call)


def placed(operands: Operands, specs: PyTree, sharding: NamedSharding | None) -> Operands:
    """Operands split as specs say; only Explicit axes ask for it, XLA moves what Auto axes need."""
    if sharding is None or not is_explicit(sharding):
        return operands
    mesh = sharding.mesh

    def split(spec: PartitionSpec, arrays: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, spec)), arrays)

    return jax.tree.map(split, specs, operands)


def is_explicit(sharding: NamedSharding | None) -> bool:
    """Whether types say how arrays are split: over a mesh with Explicit axes."""
    return sharding is not None and AxisType.Explicit in sharding.mesh.axis_types


def on_shards(
    call: Call, run: Function, in_specs: PyTree, out_specs: PyTree, check: bool = False
) -> Function:
    """`run` on each device's shards.

    Args:
      call: of the call.
      run: a function of pytrees of arrays.
      in_specs: of each argument: a spec stands for all arrays below its place, None among them.
      out_specs: of its results, likewise.
      check: whether `shard_map` checks how values vary.
    """
    if call.sharding is None:
        return run
    return jax.shard_map(
        run, mesh=call.sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check
    )


def differentiated_once(function: str, run: Function) -> Function:
    """`run`, which a custom VJP differentiates, with words for who differentiates it again.

    Each argument is guarded by itself, so that JAX still sees which of them nothing needs.
    """

    @jax.custom_jvp
    def guarded(argument: jax.Array) -> jax.Array:
        return argument

    @guarded.defjvp
    def refuse(primals: PyTree, tangents: PyTree) -> PyTree:
        raise NotImplementedError(
            f"{function}: the kernels differentiate once, in reverse mode; use "
            "implementation='xla' for second derivatives"
        )

    return lambda *arguments: run(*jax.tree.map(guarded, arguments))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(kernels: Kernels, call: Call, operands: PyTree) -> jax.Array:
    run = partial(import_module(kernels.module).forward, options=call.options)
    specs, out = kernels.specs(operands, call)
    return differentiated_once(kernels.function, on_shards(call, run, (specs,), out))(operands)


def _forward(kernels: Kernels, call: Call, operands: PyTree) -> tuple[jax.Array, PyTree]:
    return _run(kernels, call, operands), operands


def _backward(kernels: Kernels, call: Call, operands: PyTree, cotangent: jax.Array) -> PyTree:
    backward = import_module(kernels.module).backward
    dx, *sums = backward_on_shards(kernels, call, backward, operands, cotangent)
    gradients = {
        operands._fields[n]: each.astype(operands[n].dtype)
        for n, each in zip(_vectors(kernels, operands), sums, strict=True)
    }
    return (type(operands)(x=dx, **gradients),)


_run.defvjp(_forward, _backward)


def _vectors(kernels: Kernels, operands: PyTree) -> list[int]:
    """Numbers of the vectors that there are."""
    return [n for n in range(1, 1 + kernels.vectors) if operands[n] is not None]


def backward_on_shards(
    kernels: Kernels,
    call: Call,
    backward: Function,
    operands: PyTree,
    cotangent: jax.Array,
    *others: PartitionSpec,
) -> tuple[jax.Array, ...]:
    """Runs a backward on each shard.

    Args:
      kernels: whose function it differentiates.
      call: the call.
      backward: (operands, cotangent, options) → gradients of x and the vectors, and other arrays.
      operands: split as x is.
      cotangent: of the output.
      others: how each other array is split.

    Returns:
      As the backward, with the vectors' gradients added up over the shards that share them.
    """
    specs, out = kernels.specs(operands, call)
    of_vectors = [specs[n] for n in _vectors(kernels, operands)]
    split = [name for n in range(3) for name in mesh_axes(call.sharding, n)]

    def run(operands: PyTree, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        dx, *arrays = backward(operands, cotangent, call.options)
        for n, spec in enumerate(of_vectors):
            # Axes that split x but not a vector, whose gradients are then parts of one sum.
            if axes := tuple(name for name in split if name not in jax.tree.leaves(tuple(spec))):
                arrays[n] = jax.lax.psum(arrays[n], axes)
        return dx, *arrays

    each = on_shards(call, run, (specs, out), (specs[0], *of_vectors, *others))
    return differentiated_once(kernels.function, each)(operands, cotangent)
