"""Kernels are compared with XLA's fusion where they are first used on an unknown GPU."""

import json
import math
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bias_gelu, devices, first_use, rms_norm_rotary
from pallas_kernels.first_use import COMPARISONS, Comparisons, comparisons_path, seconds_of
from pallas_kernels.layernorm_modulate import layernorm_modulate, residual_layernorm_modulate

pytestmark = pytest.mark.usefixtures("own_comparisons")

KIND = "NVIDIA B999"
CASE = "bias_gelu 64 bfloat16"


@pytest.fixture
def unknown_gpu(monkeypatch):
    """Triton's kernels are supported, on a GPU that no table knows; what is measured counts."""
    monkeypatch.setattr(devices, "unsupported_triton_device", lambda: None)
    monkeypatch.setattr(devices, "device_kind", lambda: KIND)
    monkeypatch.setattr(first_use.devices, "device_kind", lambda: KIND)


def once(reference, kernel):
    """Times that count how often they were asked for."""
    calls = []

    def times():
        calls.append(1)
        return reference, kernel

    return times, calls


def test_a_case_is_measured_once_kept_and_shared_with_other_processes(
    monkeypatch,
):
    times, calls = once(3.0, 2.0)
    one, other = Comparisons(), Comparisons()
    assert one.known() == other.known() == {}
    assert [one.ratio(CASE, times) for _ in range(3)] == [1.5] * 3
    assert len(calls) == 1
    # What another process measures meanwhile is kept, too. What is neither slower nor faster may
    # not have been measured, and is measured again.
    other.ratio("two", lambda: (1.0, 2.0))
    other.ratio("three", lambda: (1.0, 1.0))
    content = json.loads(comparisons_path(devices.device_kind()).read_text())
    assert content["times_xla"] == Comparisons().known() == {CASE: 1.5, "two": 0.5}
    # Several processes measure nothing but what one shares.
    times, calls = once(3.0, 1.0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    comparisons, first = Comparisons(), Comparisons()
    assert comparisons.ratio("four", times) == 1.0
    first.use(None)
    assert first.ratio("four", times) == 3.0
    comparisons.use(first.known())
    assert comparisons.ratio("four", times) == 3.0
    assert comparisons.ratio("another", times) == 1.0
    assert len(calls) == 1
    comparisons.clear()
    assert comparisons.known() == {}


def test_it_is_measured_outside_of_the_trace_that_asks_for_it():
    found = []

    def times():
        found.append(float(jnp.sum(jnp.ones(3))))  # a tracer has no value
        return 2.0, 1.0

    assert jax.jit(lambda x: x * COMPARISONS.ratio(CASE, times))(1.0) == 2.0
    assert found == [3.0]


def test_both_passes_are_timed_with_gradients_that_are_no_constants():
    def slow(x):
        return jax.lax.fori_loop(0, 50, lambda _, y: jnp.sin(y), x)

    reference, kernel = seconds_of([slow, jnp.sin], (jnp.ones(20_000),))
    assert reference > 3 * kernel > 0
    # Of constant gradients, XLA computes parts of the backward while it compiles, for
    # minutes.
    seen = []

    @jax.custom_vjp
    def watched(x):
        return x

    def backward(_, gradient):
        jax.debug.callback(lambda each: seen.append(np.asarray(each)), gradient)
        return (gradient,)

    watched.defvjp(lambda x: (x, None), backward)
    seconds_of([watched], (jnp.ones(64, jnp.bfloat16),))
    jax.effects_barrier()
    assert seen
    assert all(np.std(each.astype(np.float32)) > 0.5 for each in seen)


class LoweringError(Exception):
    """As Pallas's own, which is no RuntimeError."""


def test_what_cannot_be_measured_is_told_and_leaves_xla():
    for error in (
        ValueError("a shape\nis odd"),
        AssertionError(),
        LoweringError(),
    ):

        def fail(error=error):
            raise error

        comparisons = Comparisons()
        with pytest.warns(UserWarning, match="bias_gelu 64 bfloat16 could not be measured"):
            assert comparisons.ratio(CASE, fail) == 1.0
        assert comparisons.ratio(CASE, fail) == 1.0  # and is not tried again
        assert not comparisons_path(devices.device_kind()).exists()


@pytest.mark.parametrize(
    ("reference", "faster"), [(1.0, False), (1.02, False), (1.03, True), (0.5, False)]
)
def test_a_kernel_is_taken_where_it_is_clearly_faster(reference, faster, monkeypatch):
    assert Comparisons().faster(CASE, lambda: (reference, 1.0)) == faster
    monkeypatch.setenv("PALLAS_KERNELS_FIRST_USE", "0")
    assert Comparisons().ratio("another", lambda: (3.0, 1.0)) == 1.0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "device": 2}', "\x00"])
def test_a_damaged_file_or_cache_is_told_and_measured_again(content, monkeypatch):
    path = comparisons_path(devices.device_kind())
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.warns(UserWarning, match="is passed over: it holds no comparisons"):
        assert Comparisons().ratio(CASE, lambda: (3.0, 1.0)) == 3.0
    assert Comparisons().known() == {CASE: 3.0}
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # no folder
    with pytest.warns(UserWarning, match="cannot be written"):
        assert Comparisons().ratio("another", lambda: (3.0, 1.0)) == 3.0


def test_a_file_in_the_home_of_somebody_else_is_passed_over(monkeypatch):
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Denied")))
    with pytest.warns(UserWarning, match="it may not be read; set XDG_CACHE_HOME"):
        assert Comparisons().known() == {}


def test_without_a_home_nothing_is_kept(no_home):
    assert Comparisons().known() == {}
    with pytest.warns(UserWarning, match="cannot be written"):
        assert Comparisons().ratio(CASE, lambda: (3.0, 1.0)) == 3.0


X = jax.ShapeDtypeStruct((1, 4096, 1536), jnp.bfloat16)
ROW = jax.ShapeDtypeStruct((1, 1536), jnp.float32)
ANGLES = jnp.zeros((4096, 64))
CALLS = {
    "bias_gelu 1536 bfloat16": lambda x, row: bias_gelu(x, row[0]),
    "rms_norm_rotary 1536 128 bfloat16": lambda x, row: rms_norm_rotary(x, row[0], head_dim=128),
    "rms_norm_rotary 1536 128 bfloat16 per head rotated": lambda x, row: rms_norm_rotary(
        x, row[0, :128], (ANGLES, ANGLES), head_dim=128
    ),
    "layernorm_modulate 1536 bfloat16 row": lambda x, row: residual_layernorm_modulate(
        x, x, row, row, row
    ),
    "layernorm_modulate 1536 bfloat16 token": lambda x, row: layernorm_modulate(
        x, jnp.broadcast_to(row, x.shape), jnp.broadcast_to(row, x.shape)
    ),
    "layernorm_modulate 1536 bfloat16 segment": lambda x, row: layernorm_modulate(
        x, row, row, segment_ids=jnp.zeros(x.shape[:2], jnp.int32)
    ),
}


@pytest.mark.usefixtures("unknown_gpu")
@pytest.mark.parametrize("case", CALLS)
def test_auto_takes_the_kernels_of_an_unknown_gpu_where_they_are_faster(case, monkeypatch):
    """And what is compared runs: both functions, forward and backward, traced at their own size."""
    traced, times = [], [0.9, 1.0]

    def trace(functions, arguments):
        for function in functions:
            out, _ = jax.eval_shape(partial(jax.vjp, function), *arguments)
            traced.append([leaf.shape for leaf in jax.tree.leaves(out)])
        assert max(each.size for each in arguments) in range(1 << 15, (1 << 16) + 1)
        return times

    monkeypatch.setattr(first_use, "seconds_of", trace)
    for api in ("bias_gelu.api", "rms_norm_rotary.api", "layernorm_modulate.implementations"):
        monkeypatch.setattr(import_module(f"pallas_kernels.{api}"), "ELEMENTS", 1 << 16)
    for ratio in (0.9, 1.1):
        times[0] = ratio
        text = str(jax.make_jaxpr(lambda *given: CALLS[case](*given))(X, ROW))
        assert COMPARISONS.known() == {case: ratio}
        assert (case.split()[0] in text) == (ratio > 1), text
        COMPARISONS.clear()
        comparisons_path(KIND).unlink()
    assert traced[0] == traced[1]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("case", CALLS)
def test_an_unknown_gpu_is_measured_while_a_program_is_traced(case, monkeypatch):
    monkeypatch.setattr(devices, "device_kind", lambda: KIND)
    arguments = (jnp.ones(X.shape, X.dtype), jnp.ones(ROW.shape))
    jax.block_until_ready(jax.jit(CALLS[case])(*arguments))
    ratio = COMPARISONS.known()[case]
    assert 0.3 < ratio < 20
    assert math.isfinite(ratio)
