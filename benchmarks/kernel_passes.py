"""Times both passes of a kernel beside XLA's fusion, by device time.

    python benchmarks/kernel_passes.py bias_gelu
    python benchmarks/kernel_passes.py rms_norm_rotary

x is bfloat16. `of_copy` is the least number of bytes of a pass, two tensors like x forward and
three backward, over its time, relative to a copy from the device to itself in the same run.

- `bias_gelu`: a bias with GELU, as between the products of a feed-forward layer; the bias is
  bfloat16. The backward holds the gradient of the bias.
- `rms_norm_rotary`: RMSNorm with rotary embedding; the weight and the rotary table are float32.
  Each shape is a call of a model: queries of Wan 2.1 and HunyuanVideo 1.5 in self-attention,
  queries of cross-attention (without rotation), keys of texts.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.bench.device import copy_bandwidth, device_time, require_gpu, rotating
from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.errors import run_command
from alload_jax.files import Json
from pallas_kernels import bias_gelu, rms_norm_rotary

_ROTATED_BYTES = 256 << 20
"""What the sets of arguments together exceed, if eight do: several times the L2 cache."""


class BiasGelu(NamedTuple):
    """A bias with GELU; `shape`, [B, S, D], is that of x."""

    shape: tuple[int, int, int]

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """x, bias and the gradient of the output."""
        shapes = (self.shape, self.shape[-1:], self.shape)
        draws = zip(jax.random.split(key, 3), shapes, strict=True)
        return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in draws)

    def passes(self, implementation: str) -> Mapping[str, Callable[..., Any]]:
        """`forward` and `backward` as functions of the arguments, by "triton" or "xla"."""

        def output(x: jax.Array, bias: jax.Array) -> jax.Array:
            return bias_gelu(x, bias, implementation=implementation)

        def backward(x: jax.Array, bias: jax.Array, cotangent: jax.Array) -> Any:
            return jax.vjp(output, x, bias)[1](cotangent)

        return {"forward": lambda x, bias, _: output(x, bias), "backward": backward}


class RmsNormRotary(NamedTuple):
    """RMSNorm; whether each head has statistics of its own, and whether it rotates."""

    shape: tuple[int, int, int]
    head_dim: int = 128
    per_head: bool = False
    rotates: bool = True

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """x, weight, cos, sin and the gradient of the output."""
        batch, tokens, dim = self.shape
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], self.shape, jnp.bfloat16)
        weight = 1 + 0.1 * jax.random.normal(keys[1], (self.head_dim if self.per_head else dim,))
        angle = jax.random.normal(keys[2], (tokens, self.head_dim // 2))
        heads = (batch, tokens, dim // self.head_dim, self.head_dim)
        cotangent = jax.random.normal(keys[3], heads, jnp.bfloat16)
        return x, weight, jnp.cos(angle), jnp.sin(angle), cotangent

    def passes(self, implementation: str) -> Mapping[str, Callable[..., Any]]:
        """As of `BiasGelu`."""

        def output(x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
            rotary = (cos, sin) if self.rotates else None
            options: Json = {"head_dim": self.head_dim, "implementation": implementation}
            return rms_norm_rotary(x, weight, rotary, **options)

        def backward(x: jax.Array, weight: jax.Array, *others: jax.Array) -> Any:
            *tables, cotangent = others
            return jax.vjp(lambda x, weight: output(x, weight, *tables), x, weight)[1](cotangent)

        return {"forward": lambda *given: output(*given[:4]), "backward": backward}


Case = BiasGelu | RmsNormRotary
CASES: dict[str, dict[str, Case]] = {
    "bias_gelu": {
        "Wan 1.3B, 480p clip": BiasGelu((1, 32760, 8960)),
        "Wan 1.3B, images": BiasGelu((42, 1560, 8960)),
        "Wan 1.3B, one image": BiasGelu((1, 1560, 8960)),
        "Wan 1.3B, one small image": BiasGelu((1, 256, 8960)),
        "Wan 5B, 720p clip": BiasGelu((1, 27280, 14336)),
        "Wan 14B, 480p clip": BiasGelu((1, 32760, 13824)),
        "HunyuanVideo 1.5, 720p clip": BiasGelu((1, 32400, 8192)),
        "HunyuanVideo 1.5, texts": BiasGelu((1, 1985, 8192)),
        "width 1024": BiasGelu((8, 4096, 1024)),
        "width 1152": BiasGelu((8, 4096, 1152)),
        "width 1536": BiasGelu((8, 4096, 1536)),
        "width 4608": BiasGelu((8, 4096, 4608)),
        "width 5000": BiasGelu((8, 4096, 5000)),
        "width 6144": BiasGelu((8, 4096, 6144)),
        "width 20480": BiasGelu((4, 4096, 20480)),
    },
    "rms_norm_rotary": {
        "Wan 1.3B, 480p clip": RmsNormRotary((1, 32760, 1536)),
        "Wan 1.3B, images": RmsNormRotary((42, 1560, 1536)),
        "Wan 1.3B, cross-attention": RmsNormRotary((42, 1560, 1536), rotates=False),
        "Wan 1.3B, one image": RmsNormRotary((1, 1560, 1536)),
        "Wan 1.3B, one small image": RmsNormRotary((1, 256, 1536)),
        "Wan 1.3B, keys of texts": RmsNormRotary((4, 512, 1536), rotates=False),
        "Wan 5B, 720p clip": RmsNormRotary((1, 27280, 3072)),
        "Wan 14B, 480p clip": RmsNormRotary((1, 32760, 5120)),
        "HunyuanVideo 1.5, 720p clip": RmsNormRotary((1, 32400, 2048), per_head=True),
        "HunyuanVideo 1.5, image": RmsNormRotary((1, 3600, 2048), per_head=True),
        "width 1152, heads of 64": RmsNormRotary((8, 4096, 1152), head_dim=64),
        "width 2304": RmsNormRotary((1, 32760, 2304)),
        "width 4864": RmsNormRotary((1, 8192, 4864)),
        "width 8192": RmsNormRotary((1, 8192, 8192)),
    },
}


def main(argv: list[str]) -> int:
    """Measures all cases of a kernel and writes the result."""
    parser = benchmark_parser(__doc__, "kernel_passes.json")
    parser.add_argument("kernel", choices=CASES)
    options = parser.parse_args(argv)
    require_gpu()
    copy = copy_bandwidth()
    record = Record(options.out, ("jax", "jaxlib"), copy_bytes_per_second=copy)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, case in CASES[options.kernel].items():
            record.add(*rows(name, case, times(case, pool), copy), to="rows")
    return 0


def times(case: Case, pool: ThreadPoolExecutor) -> dict[tuple[str, str], float]:
    """µs of each pass of each implementation."""
    count = min(8, max(2, math.ceil(_ROTATED_BYTES / (4 * math.prod(case.shape)))))
    sets = [case.arguments(jax.random.key(seed)) for seed in range(count)]
    pending = {
        (direction, implementation): pool.submit(rotating, function, sets)
        for implementation in ("triton", "xla")
        for direction, function in case.passes(implementation).items()
    }
    return {key: device_time(each.result(), sets, 5).median for key, each in pending.items()}


def rows(name: str, case: Case, us: Mapping[tuple[str, str], float], copy: float) -> Iterator[Json]:
    """What the JSON says of a case; prints it."""
    for direction, tensors in (("forward", 2), ("backward", 3)):
        kernel, xla = us[direction, "triton"], us[direction, "xla"]
        of_copy = tensors * 2 * math.prod(case.shape) / kernel * 1e6 / copy
        row = {"case": name, **case._asdict(), "pass": direction, "us": kernel}
        row |= {"of_copy": of_copy, "xla_us": xla, "times_xla": xla / kernel}
        print(row, flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
