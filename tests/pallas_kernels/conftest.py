import dataclasses

import jax
import pytest

from pallas_kernels import devices
from pallas_kernels.layernorm_modulate import tuning

MEASURED = tuning.blocks_for
GPU_WAYS = ("triton", "mosaic")


def one_each(kernel, dim):
    return dataclasses.replace(MEASURED(kernel, dim), per_core=1)


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def interpret(request):
    on_gpu = jax.default_backend() == "gpu"
    if request.param == on_gpu:
        pytest.skip("runs in the interpreter" if request.param else "needs a GPU")
    return request.param


@pytest.fixture(
    params=["interpreted", "xla", *(pytest.param(w, marks=pytest.mark.gpu) for w in GPU_WAYS)]
)
def way(request):
    """How LayerNorm-Modulate runs: True for the interpreter, or an implementation's name."""
    if (jax.default_backend() == "gpu") != (request.param in GPU_WAYS):
        pytest.skip("not on this device")
    if request.param == "mosaic":
        request.getfixturevalue("on_hopper")
    if request.param == "interpreted":
        request.getfixturevalue("few_programs")
        return True
    return request.param


@pytest.fixture
def few_programs(monkeypatch):
    """Seven programs in place of thousands, which the interpreter would run one by one."""
    if jax.default_backend() != "gpu":
        monkeypatch.setattr(tuning, "blocks_for", one_each)
        monkeypatch.setattr(devices, "core_count", lambda: 7)


@pytest.fixture
def on_hopper(monkeypatch):
    """Few programs there, so that each walks through many rows and segments, and no Triton."""
    if reason := devices.unsupported_mosaic_device():
        pytest.skip(str(reason))
    monkeypatch.setattr(devices, "core_count", lambda: 3)
    monkeypatch.setattr(devices, "lowers_triton", lambda: False)


@pytest.fixture
def on_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


@pytest.fixture
def for_cuda(monkeypatch):
    """Lets kernels be lowered on a host without their device."""
    monkeypatch.setattr(devices, "unsupported_triton_device", lambda: None)
    monkeypatch.setattr(devices, "unsupported_mosaic_device", lambda: None)
