import pytest
from kernel_cases import both_lowered_for_cuda, kernels_launched, shapes_of

from pallas_kernels.layernorm_modulate.workloads import WORKLOADS

LARGE = {"over 2**31 elements": (1, 500_000, 5120), "many rows": (5, 100_000, 8192)}
SHAPES = {name: workload.shape for name, workload in WORKLOADS.items()} | LARGE


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("residual", [False, True])
def test_workloads_lower_for_cuda(name, residual):
    module = both_lowered_for_cuda(shapes_of(SHAPES[name], "row", residual))
    assert kernels_launched(module) == ["forward", "backward", "reduce"]


@pytest.mark.parametrize("layout", ["token", "segment"])
@pytest.mark.parametrize("residual", [False, True])
def test_layouts_lower_for_cuda(layout, residual):
    names = kernels_launched(both_lowered_for_cuda(shapes_of((2, 4096, 1536), layout, residual)))
    assert names == ["forward", "backward"] + (["reduce"] if layout == "segment" else [])


def test_aligned_segments_lower_for_cuda():
    both_lowered_for_cuda(shapes_of((2, 4096, 1536), "segment", True), segment_block=128)


@pytest.mark.parametrize("dim", [1, 31, 96, 8192, 10_000])
def test_odd_widths_lower_for_cuda(dim):
    both_lowered_for_cuda(shapes_of((2, 37, dim), "row", True))
