"""What a JAX runs that has no Pallas lowering through Triton: the one that JAX deprecates."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from kernel_cases import BF16, F32
from lowering import lowered_for_cuda

from pallas_kernels import (
    choose_rows,
    devices,
    layernorm_modulate,
    residual_layernorm_modulate,
    segmentation,
)
from pallas_kernels.bias_gelu import bias_gelu, bias_gelu_then
from pallas_kernels.block_sparse_attention import (
    BlockSegments,
    PooledScores,
    block_sparse_attention,
    pool_blocks,
    top_k_blocks,
)
from pallas_kernels.rms_norm_rotary import rms_norm_rotary

TOKENS = 32_768
KERNELS = {
    "norm": 2,
    "norm after a residual": 2,
    "norm of segments": 2,
    "norm by token": 0,
    "norm of an odd width": 0,
    "rotary": 2,
    "rotary by head": 2,
    "gelu": 2,
    "gelu, then": 2,
    "attention": 3,
    "rows": 0,
}
"""Kernels through Mosaic GPU of a forward and a backward; XLA computes the rest."""


@pytest.mark.slow
def test_auto_lowers_all_functions_and_their_gradients():
    script = (
        "import sys; sys.path += ['../..', '..']; "
        "sys.modules['jax.experimental.pallas.triton'] = None; "
        "import test_without_triton; test_without_triton.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert "layernorm_modulate: 'triton' cannot run, JAX" in found.pop("error")
    assert found == KERNELS


def main():
    """Prints how many kernels each function has, as JSON, and what "triton" says."""
    x, row = jnp.ones((2, 3, 4)), jnp.ones((2, 4))
    layernorm_modulate(x, row, row, segment_ids=segmentation(jnp.zeros((2, 3), int), 2, 4))
    found = {}
    try:
        layernorm_modulate(x, row, row, implementation="triton")
    except NotImplementedError as error:
        found["error"] = str(error)
    devices.unsupported_triton_device = devices.unsupported_mosaic_device = lambda: None
    devices.device_kind = lambda: "NVIDIA H200"
    for name, (function, count, arrays) in calls().items():
        text = lowered_for_cuda(partial(with_gradients, function, count), *arrays)
        assert "xla.gpu.triton" not in text
        found[name] = text.count("@mosaic_gpu_v2")
    print(json.dumps(found))


def with_gradients(function, count, *arrays):
    """A function, and its gradients in the first arrays."""
    if not count:
        return function(*arrays)
    out, pull = jax.vjp(lambda *some: function(*some, *arrays[count:]), *arrays[:count])
    return out, pull(jax.tree.map(jnp.ones_like, out))


def calls():
    """By name a function, in how many of its arguments it is differentiated, and those."""

    def of(*shape, dtype=BF16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def by_segment(x, scale, shift, ids):
        return layernorm_modulate(x, scale, shift, segment_ids=ids)

    def rotated(x, weight, cos, sin):
        return rms_norm_rotary(x, weight, (cos, sin), head_dim=128)

    def then(x, bias):
        return bias_gelu_then(x, bias, lambda hidden, half: hidden * half, 0.5)

    def chosen(one, other, choice):
        return choose_rows((one, other), choice)

    x, ids = of(1, TOKENS, 1536), of(1, TOKENS, dtype=jnp.int32)
    row, token, table = (of(1, *n, 1536, dtype=F32) for n in ((), (TOKENS,), (5,)))
    odd, odd_row = of(1, TOKENS, 1500), of(1, 1500, dtype=F32)
    angles = (of(TOKENS, 64, dtype=F32),) * 2
    hidden = of(1, TOKENS, 8960), of(8960, dtype=F32)
    return {
        "norm": (layernorm_modulate, 3, (x, row, row)),
        "norm after a residual": (residual_layernorm_modulate, 5, (x, x, row, row, row)),
        "norm of segments": (by_segment, 3, (x, table, table, ids)),
        "norm by token": (layernorm_modulate, 3, (x, token, token)),
        "norm of an odd width": (layernorm_modulate, 3, (odd, odd_row, odd_row)),
        "rotary": (rotated, 2, (x, of(1536), *angles)),
        "rotary by head": (rotated, 2, (x, of(128), *angles)),
        "gelu": (bias_gelu, 2, hidden),
        "gelu, then": (then, 2, hidden),
        "attention": (attended, 3, (of(1, TOKENS, 12, 128),) * 3),
        "rows": (chosen, 0, (of(TOKENS, 1536), of(TOKENS, 1536), of(TOKENS, dtype=jnp.int32))),
    }


def attended(q, k, v):
    """Attention to the eight best blocks of 64 tokens."""
    ids = jnp.zeros((1, TOKENS // 64), jnp.int32)
    pooled = PooledScores(*(pool_blocks(each, ids + 64, block=64) for each in (q, k)))
    blocks = top_k_blocks(pooled, 8, BlockSegments(ids, ids), ids + 64, ids + 64, k_max=8)
    return block_sparse_attention(q, k, v, blocks)
