"""The memory that a run says it needs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alload_jax.errors import InputError
from alload_jax.training.device_memory import (
    STATE_REMEDY,
    RunMemory,
    in_words,
    memory_named,
    run_memory,
)
from alload_jax.training.state import TrainState


def state_of(size):
    params = {"w": jnp.zeros((size, size))}
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        key=jnp.zeros(2, jnp.uint32),
        params=params,
        ema={"w": jnp.zeros((size, size))},
        opt_state=(jnp.zeros((size, size)),),
        frozen={},
        variables={},
    )


@pytest.mark.parametrize("size", [64, 256])
def test_it_is_what_the_arrays_and_the_program_take(size):
    state = state_of(size)

    def gradient(weights, accumulator, batch):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w) ** 2))(weights.params["w"])
        return accumulator + grads

    accumulator, batch = jnp.zeros((size, size)), jnp.ones((8, size))
    lowered = jax.jit(gradient, donate_argnums=1).lower(state.weights, accumulator, batch)
    program = lowered.compile()
    found = run_memory(state, [program])
    assert found.state == 3 * 4 * size**2 + 4 + 8
    least = accumulator.nbytes + batch.nbytes  # and what the program computes in between
    temporary = program.memory_analysis().temp_size_in_bytes
    assert least + temporary <= found.step <= least + temporary + accumulator.nbytes
    assert run_memory(state, []) is None


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 19.72GiB with allocator "
        "GPU_0_bfc on device 0. [executable_name='jit_update']",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 19.72GiB.\n\nSuggestions:\n…",
    ],
)
def test_a_device_that_is_out_of_memory_is_one_line_with_a_remedy(said):
    with pytest.raises(InputError) as error, memory_named():
        raise jax.errors.JaxRuntimeError(said)
    (line,) = str(error.value).splitlines()
    assert "memory (Out of memory while trying to allocate 19.72GiB" in line
    assert "executable_name" not in line
    assert "lower planning.m_mem" in line


def test_a_state_that_does_not_fit_has_a_remedy_of_its_own():
    with pytest.raises(InputError) as error, memory_named("the state", STATE_REMEDY):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    assert str(error.value).startswith("the state does not fit a device's memory (Out of memory)")
    assert "planning.m_mem" not in str(error.value)


def test_the_host_s_memory_has_a_remedy_of_its_own():
    said = (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB with allocator "
        "xla_gpu_host_bfc on device 0."
    )
    with pytest.raises(InputError) as error, memory_named():
        raise jax.errors.JaxRuntimeError(said)
    assert str(error.value) == (
        "a step does not fit the host's memory (Out of memory while trying to allocate 2.00GiB); "
        "lower planning.m_mem, set model.remat to offload or full, or raise "
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    )


def test_it_warns_where_a_step_is_larger_than_the_host_allows():
    found = RunMemory(10, 10, None, 3_000_000_000, 2e9)
    assert found.line().endswith("; 3.0 GB of the host's memory")
    assert found.warning().startswith(
        "a step needs 3.0 GB of the host's memory and a device may use 2.0 GB of it; lower"
    )
    assert not found._replace(host_limit=4e9).warning()
    assert found._replace(limit=19).warning().startswith("a step needs 0.0 MB and a device")


def test_other_errors_of_the_runtime_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_named():
        raise jax.errors.JaxRuntimeError("INTERNAL: the driver is gone")


def test_programs_that_say_nothing_are_passed_over():
    silent = SimpleNamespace(memory_analysis=lambda: None)
    assert run_memory(state_of(2), [silent]) is None


def test_it_warns_where_a_step_is_larger_than_the_device():
    rng = np.random.default_rng(0)
    for _ in range(50):
        state, step, limit = (int(each) for each in rng.integers(1, 100e9, 3))
        found = RunMemory(state, step, limit)
        assert bool(found.warning()) == (state + step > limit)
        assert f"of {in_words(limit)}" in found.line()
    assert not RunMemory(10, 10, None).warning()
    assert ", of" not in RunMemory(10, 10, None).line()


@pytest.mark.parametrize(
    ("size", "words"), [(142_600_000_000, "142.6 GB"), (1_000_000_000, "1.0 GB"), (2e6, "2.0 MB")]
)
def test_sizes_are_written_in_the_unit_that_suits_them(size, words):
    assert in_words(size) == words
