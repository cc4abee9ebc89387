"""Records the programs of all kernels as lowered for CUDA, and compares a later version with them.

    python benchmarks/golden_kernels.py --record before.json
    python benchmarks/golden_kernels.py --compare before.json

It needs no GPU. Equal digests are equal programs: same results, same speed. Where kernels stand in
files is left out of them. Digests differ between versions of JAX.
"""

import argparse
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import jax
import jax.numpy as jnp

import pallas_kernels as kernels
from pallas_kernels import devices

WIDTHS = (1536, 3072, 5120)
TOKENS, HEAD, ROWS = 2048, 128, 8
Case = tuple[str, Callable[..., Any], list[jax.ShapeDtypeStruct]]


def main() -> int:
    """Records or compares; status 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="file to write")
    parser.add_argument("--compare", type=Path, help="file of another version")
    options = parser.parse_args()
    with (
        mock.patch.object(devices, "unsupported_triton_device", return_value=None),
        mock.patch.object(devices, "unsupported_mosaic_device", return_value=None),
        mock.patch.object(devices, "device_kind", return_value="NVIDIA H200"),
    ):
        found = {name: digest(function, shapes) for name, function, shapes in cases()}
    if options.record:
        options.record.write_text(json.dumps(found, indent=1) + "\n")
    earlier = json.loads(options.compare.read_text()) if options.compare else found
    differing = [name for name in found.keys() | earlier if found.get(name) != earlier.get(name)]
    print(f"{len(found)} programs, {len(differing)} differ {' '.join(sorted(differing))}")
    return 1 if differing else 0


def digest(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct]) -> str:
    """Of the gradient with respect to all floats."""
    floats = [n for n, each in enumerate(shapes) if jnp.issubdtype(each.dtype, jnp.floating)]

    def loss(*arrays: jax.Array) -> jax.Array:
        results = jax.tree.leaves(function(*arrays))
        return sum((each.astype(jnp.float32).sum() for each in results), jnp.zeros(()))

    traced = jax.jit(jax.grad(loss, floats)).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return hashlib.sha256(text.encode()).hexdigest()


def cases() -> Iterator[Case]:
    """All functions under all implementations, with some widths."""
    for width in WIDTHS:
        x, vector, row = _bf16(2, TOKENS, width), _wide(width), _wide(2, width)
        table, ids = _wide(2, ROWS, width), jax.ShapeDtypeStruct((2, TOKENS), jnp.int32)
        for name in ("triton", "xla", "auto"):
            use = functools.partial(functools.partial, implementation=name)
            gelu, then = use(kernels.bias_gelu), use(kernels.bias_gelu_then)
            yield f"gelu {width} {name}", gelu, [x, vector]
            product = functools.partial(_then, then)
            yield f"gelu then {width} {name}", product, [x, vector, _bf16(width, 64)]
            rotary = functools.partial(_rotary, use(kernels.rms_norm_rotary))
            for own in (width, HEAD):
                angles = [_wide(TOKENS, HEAD // 2)] * 2
                yield f"rotary {width} {own} {name}", rotary, [x, _wide(own), vector, *angles]
        for name in ("triton", "mosaic", "xla", "auto"):
            use = functools.partial(functools.partial, implementation=name)
            norm, residual = (
                use(kernels.layernorm_modulate),
                use(kernels.residual_layernorm_modulate),
            )
            yield f"norm {width} {name}", norm, [x, row, row]
            yield f"norm of tokens {width} {name}", norm, [x, x, x]
            yield f"norm of segments {width} {name}", _segments(norm), [x, table, table, ids]
            yield f"residual {width} {name}", residual, [x, x, row, row, row]
            yield f"sum {width} {name}", _sum(residual), [x, x, row, row]
    for name in ("triton", "xla", "auto"):
        rows = functools.partial(_rows, functools.partial(kernels.choose_rows, implementation=name))
        yield f"rows {name}", rows, [_bf16(4096, 1536)] * 2
    for name in ("triton", "mosaic", "xla", "auto"):
        for width in (64, HEAD):
            attend = functools.partial(_attention, name)
            yield f"attention {width} {name}", attend, [_bf16(1, 1024, 4, width)] * 3


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _wide(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _then(function: Callable[..., Any], x: Any, bias: Any, weight: Any) -> jax.Array:
    return function(x, bias, lambda h, weight: h @ weight, weight)


def _rotary(
    function: Callable[..., Any], x: Any, weight: Any, bias: Any, cos: Any, sin: Any
) -> jax.Array:
    return function(x, weight, (cos, sin), head_dim=HEAD, bias=bias)


def _segments(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, scale, shift, ids: function(x, scale, shift, segment_ids=ids)


def _sum(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, scale, shift: function(x, y, None, scale, shift)


def _rows(function: Callable[..., Any], one: Any, other: Any) -> jax.Array:
    return function([one, other], jnp.arange(len(one), dtype=jnp.int32) % 3 - 1) + one * other


def _attention(name: str, q: Any, k: Any, v: Any) -> jax.Array:
    lists = jnp.zeros((1, 4, 8, 4), jnp.int32) + jnp.arange(4, dtype=jnp.int32)
    tokens = jnp.full((1, 8), 128, jnp.int32)
    counts = jnp.full((1, 4, 8), 4, jnp.int32)
    blocks = kernels.BlockLists(lists, counts, tokens, tokens, 128, 128)
    return kernels.block_sparse_attention(q, k, v, blocks, implementation=name)


if __name__ == "__main__":
    sys.exit(main())
