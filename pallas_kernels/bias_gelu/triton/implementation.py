"""The Triton kernels as an implementation: what they can do, and where they are faster."""

from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp

from pallas_kernels import devices, triton_support
from pallas_kernels.bias_gelu.differentiable import FusedImplementation
from pallas_kernels.bias_gelu.operands import CallConfig, Operands, Options
from pallas_kernels.bias_gelu.reference import XlaImplementation
from pallas_kernels.bias_gelu.triton import tuning
from pallas_kernels.first_use import COMPARISONS, ELEMENTS, compared
from pallas_kernels.triton.lazy_calls import LazyCalls


class TritonImplementation(LazyCalls[Operands, Options], FusedImplementation):
    """The kernels of this folder, on NVIDIA GPUs."""

    name = "triton"
    interpretable = True
    calls = "pallas_kernels.bias_gelu.triton.calls"

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Another device or JAX, a checking shard_map, a split that does not fit."""
        return (
            triton_support.unsupported_here(interpret=config.options.interpret)
            or devices.unsupported_manual_axes(operands.x)
            or super().unsupported_reason(operands, config)
        )

    def faster_than_reference(self, operands: Operands, config: CallConfig) -> bool:
        """As measured, see `tuning.py`; where nothing was, as it is at first use."""
        x, sharding = operands.x, config.sharding
        shards = devices.shards_of(sharding, 2)
        elements = devices.elements_per_device(x, sharding) // shards
        kind, width = devices.device_kind(), x.shape[-1] // shards
        known = tuning.measured_as_faster(kind, elements, width, x.dtype.itemsize)
        if known is not None:
            return known
        case = f"{self.function} {width} {x.dtype}"
        return COMPARISONS.faster(case, partial(self._times, width, x.dtype))

    def output_and_backward(
        self, operands: Operands, cotangent: jax.Array, options: Options
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `FusedImplementation.output_and_backward`."""
        return import_module(self.calls).output_and_backward(operands, cotangent, options)

    def _times(self, width: int, dtype: jnp.dtype) -> tuple[float, float]:
        """Seconds of XLA's fusion and of the kernels."""
        keys = jax.random.split(jax.random.key(0))
        x = jax.random.normal(keys[0], (1, max(1, ELEMENTS // width), width), dtype)
        bias, config = jax.random.normal(keys[1], (width,)), CallConfig(Options(), None)
        return compared((XlaImplementation(), self), Operands, config, (x, bias))
