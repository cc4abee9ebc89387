import dataclasses

import jax
import pytest

from pallas_kernels import devices
from pallas_kernels.layernorm_modulate import tuning

MEASURED = tuning.blocks_for


def one_each(kernel, dim):
    return dataclasses.replace(MEASURED(kernel, dim), per_core=1)


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def interpret(request):
    on_gpu = jax.default_backend() == "gpu"
    if request.param == on_gpu:
        pytest.skip("runs in the interpreter" if request.param else "needs a GPU")
    return request.param


@pytest.fixture
def few_programs(monkeypatch, interpret):
    """Seven programs in place of thousands, which the interpreter would run one by one."""
    if interpret:
        monkeypatch.setattr(tuning, "blocks_for", one_each)
        monkeypatch.setattr(devices, "core_count", lambda: 7)


@pytest.fixture
def on_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


@pytest.fixture
def for_cuda(monkeypatch):
    """Lets kernels be lowered on a host without their device."""
    monkeypatch.setattr(devices, "unsupported_triton_device", lambda: None)
    monkeypatch.setattr(devices, "unsupported_mosaic_device", lambda: None)
