"""The Triton kernels as an implementation: what they can do, and where they are faster."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import devices, triton_support
from pallas_kernels.first_use import COMPARISONS, ELEMENTS, compared
from pallas_kernels.rms_norm_rotary.differentiable import FusedImplementation
from pallas_kernels.rms_norm_rotary.operands import CallConfig, Operands, Options
from pallas_kernels.rms_norm_rotary.reference import XlaImplementation
from pallas_kernels.rms_norm_rotary.triton import tuning
from pallas_kernels.triton.lazy_calls import LazyCalls


class TritonImplementation(LazyCalls[Operands, Options], FusedImplementation):
    """The kernels of this folder, on NVIDIA GPUs."""

    name = "triton"
    interpretable = True
    calls = "pallas_kernels.rms_norm_rotary.triton.calls"

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Another device or JAX, a checking shard_map, an odd head, a split that does not fit."""
        head_dim = config.options.head_dim
        if head_dim & (head_dim - 1) or head_dim < 2:
            return NotImplementedError(
                f"head_dim={head_dim} is not a power of two from 2 on; use 'xla' or 'auto'"
            )
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
        width, head_dim = x.shape[-1] // shards, config.options.head_dim
        kind = devices.device_kind()
        known = tuning.measured_as_faster(kind, elements, width, head_dim, x.dtype.itemsize)
        if known is not None:
            return known
        rotates = operands.cos is not None
        case = f"{self.function} {width} {head_dim} {x.dtype}"
        case += " per head" * config.options.per_head + " rotated" * rotates
        times = partial(self._times, width, x.dtype, config.options, rotates)
        return COMPARISONS.faster(case, times)

    def _times(
        self, width: int, dtype: jnp.dtype, options: Options, rotates: bool
    ) -> tuple[float, float]:
        """Seconds of XLA's fusion and of the kernels."""
        tokens, keys = max(1, ELEMENTS // width), jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (1, tokens, width), dtype)
        weight = jax.random.normal(keys[1], (options.head_dim if options.per_head else width,))
        angle = jax.random.normal(keys[2], (tokens, options.head_dim // 2))
        table = (jnp.cos(angle), jnp.sin(angle)) if rotates else (None, None)

        def operands(x: jax.Array, weight: jax.Array) -> Operands:
            return Operands(x, weight, None, *table)

        config = CallConfig(options, None)
        return compared((XlaImplementation(), self), operands, config, (x, weight))
