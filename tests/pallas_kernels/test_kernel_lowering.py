import jax
import jax.numpy as jnp
import pytest
from kernel_cases import BF16, F32, kernels_for_cuda, kernels_launched, lowered_for_cuda

from pallas_kernels.layernorm_modulate.operands import Operands
from pallas_kernels.layernorm_modulate.workloads import WORKLOADS

LARGE = {"over 2**31 elements": (1, 500_000, 5120), "many rows": (5, 100_000, 8192)}
SHAPES = {name: workload.shape for name, workload in WORKLOADS.items()} | LARGE


def shapes_of(shape, layout, residual):
    """The operands' shapes alone: nothing so large is made."""
    batch, seq_len, dim = shape
    table = {"row": (batch, dim), "token": shape, "segment": (batch, 64, dim)}[layout]
    x, modulation = jax.ShapeDtypeStruct(shape, BF16), jax.ShapeDtypeStruct(table, F32)
    ids = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32) if layout == "segment" else None
    branch = (x, modulation) if residual else (None, None)
    return Operands(x, modulation, modulation, *branch, segment_ids=ids)


def lower(operands, **static):
    run = kernels_for_cuda(**static)

    def both(operands, cotangents):
        ids = operands.segment_ids
        outputs, pull = jax.vjp(lambda *a: run(Operands(*a, segment_ids=ids)), *operands[:5])
        return outputs, pull(cotangents)

    h = None if operands.y is None else operands.x
    return lowered_for_cuda(both, operands, (h, operands.x))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("residual", [False, True])
def test_workloads_lower_for_cuda(name, residual):
    module = lower(shapes_of(SHAPES[name], "row", residual))
    assert kernels_launched(module) == ["forward", "backward", "reduce"]


@pytest.mark.parametrize("layout", ["token", "segment"])
@pytest.mark.parametrize("residual", [False, True])
def test_layouts_lower_for_cuda(layout, residual):
    names = kernels_launched(lower(shapes_of((2, 4096, 1536), layout, residual)))
    assert names == ["forward", "backward"] + (["reduce"] if layout == "segment" else [])


def test_aligned_segments_lower_for_cuda():
    lower(shapes_of((2, 4096, 1536), "segment", True), segment_block=128)


@pytest.mark.parametrize("dim", [1, 31, 96, 8192, 10_000])
def test_odd_widths_lower_for_cuda(dim):
    lower(shapes_of((2, 37, dim), "row", True))
