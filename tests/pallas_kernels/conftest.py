import dataclasses

import jax
import pytest

from pallas_kernels.layernorm_modulate.triton import tuning

MEASURED = tuning.blocks_for


def seven(kernel, dim):
    return dataclasses.replace(MEASURED(kernel, dim), programs=7)


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
        monkeypatch.setattr(tuning, "blocks_for", seven)


@pytest.fixture
def on_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
