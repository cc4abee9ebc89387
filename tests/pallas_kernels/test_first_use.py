"""Kernels are compared with XLA's fusion where they are first used on an unknown GPU."""

import json
import math
import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        calls.append(threading.get_ident())
        return reference, kernel

    return times, calls


def test_a_case_is_measured_once_and_kept_for_later_processes():
    times, calls = once(3.0, 2.0)
    assert [Comparisons().ratio(CASE, times) for _ in range(3)] == [1.5] * 3
    assert len(calls) == 1
    content = json.loads(comparisons_path(devices.device_kind()).read_text())
    assert content["times_xla"] == {CASE: 1.5}
    assert Comparisons().known() == {CASE: 1.5}


def test_cases_are_added_to_those_that_are_known():
    Comparisons().ratio("one", lambda: (1.0, 2.0))
    Comparisons().ratio("two", lambda: (4.0, 2.0))
    assert Comparisons().known() == {"one": 0.5, "two": 2.0}


def test_it_is_measured_outside_of_the_trace_that_asks_for_it():
    found = []

    def times():
        found.append(float(jnp.sum(jnp.ones(3))))  # a tracer has no value
        return 2.0, 1.0

    @jax.jit
    def function(x):
        return x * COMPARISONS.ratio(CASE, times)

    assert function(1.0) == 2.0
    assert found == [3.0]


def test_both_passes_of_both_functions_are_timed():
    many = 200

    def slow(x):
        return jax.lax.fori_loop(0, many, lambda _, y: jnp.sin(y), x)

    x = jnp.ones(20_000)
    reference, kernel = seconds_of([slow, jnp.sin], (x,))
    assert reference > 3 * kernel > 0


class LoweringError(Exception):
    """As Pallas's own, which is no RuntimeError."""


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("no such type"),
        ValueError("a shape\nis odd"),
        RuntimeError("ptxas fails"),
        TypeError("odd"),
        AssertionError(),
        LoweringError("no rule"),
    ],
)
def test_what_cannot_be_measured_is_told_and_leaves_xla(error):
    def fail():
        raise error

    comparisons = Comparisons()
    with pytest.warns(UserWarning, match="bias_gelu 64 bfloat16 could not be measured"):
        assert comparisons.ratio(CASE, fail) == 1.0
    assert comparisons.ratio(CASE, fail) == 1.0  # and is not tried again
    assert not comparisons_path(devices.device_kind()).exists()


@pytest.mark.parametrize(("kernel", "faster"), [(1.0, False), (0.99, False), (0.9, True)])
def test_a_kernel_is_taken_where_it_is_clearly_faster(kernel, faster):
    assert Comparisons().faster(CASE, lambda: (1.0, kernel)) == faster


def test_what_two_processes_measure_is_kept_by_both():
    one, other = Comparisons(), Comparisons()
    assert one.known() == other.known() == {}
    one.ratio("one", lambda: (3.0, 1.0))
    other.ratio("two", lambda: (2.0, 1.0))
    assert Comparisons().known() == {"one": 3.0, "two": 2.0}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "device": 2}', "\x00"])
def test_a_damaged_file_is_told_and_measured_again(content):
    path = comparisons_path(devices.device_kind())
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.warns(UserWarning, match="is passed over: it holds no comparisons"):
        assert Comparisons().ratio(CASE, lambda: (3.0, 1.0)) == 3.0
    assert Comparisons().known() == {CASE: 3.0}


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert Comparisons().ratio(CASE, lambda: (3.0, 1.0)) == 3.0


def test_several_processes_measure_nothing_but_what_one_shares(monkeypatch):
    times, calls = once(3.0, 1.0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    comparisons = Comparisons()
    assert comparisons.ratio(CASE, times) == 1.0
    first = Comparisons()
    first.use(None)
    assert first.ratio(CASE, times) == 3.0
    comparisons.use(first.known())
    assert comparisons.ratio(CASE, times) == 3.0
    assert comparisons.ratio("another", times) == 1.0
    assert len(calls) == 1


def test_a_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv("PALLAS_KERNELS_FIRST_USE", "0")
    assert Comparisons().ratio(CASE, lambda: (3.0, 1.0)) == 1.0


@given(st.dictionaries(st.text(max_size=20), st.floats(0.01, 100), max_size=5))
def test_a_file_holds_what_was_measured(ratios):
    comparisons_path(devices.device_kind()).unlink(missing_ok=True)
    for case, ratio in ratios.items():
        Comparisons().ratio(case, partial(tuple, (ratio, 1.0)))
    # What is neither slower nor faster may not have been measured, and is measured again.
    assert Comparisons().known() == {case: each for case, each in ratios.items() if each != 1.0}


X = jax.ShapeDtypeStruct((1, 4096, 1536), jnp.bfloat16)
ROW = jax.ShapeDtypeStruct((1, 1536), jnp.float32)
CALLS = {
    "bias_gelu 1536 bfloat16": lambda x, row: bias_gelu(x, row[0]),
    "rms_norm_rotary 1536 128 bfloat16": lambda x, row: rms_norm_rotary(x, row[0], head_dim=128),
    "layernorm_modulate 1536 bfloat16 row": layernorm_modulate,
    "layernorm_modulate 1536 bfloat16 token": lambda x, row: layernorm_modulate(
        x, jnp.broadcast_to(row, x.shape), jnp.broadcast_to(row, x.shape)
    ),
    "layernorm_modulate 1536 bfloat16 segment": lambda x, row: layernorm_modulate(
        x, row, row, segment_ids=jnp.zeros(x.shape[:2], jnp.int32)
    ),
}
CALLS["layernorm_modulate 1536 bfloat16 row"] = lambda x, row: residual_layernorm_modulate(
    x, x, row, row, row
)


@pytest.mark.usefixtures("unknown_gpu")
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_auto_takes_the_kernels_of_an_unknown_gpu_where_they_are_faster(case, ratio, monkeypatch):
    asked = []

    def ratio_of(self, name, times):
        asked.append(name)
        return ratio

    monkeypatch.setattr(Comparisons, "ratio", ratio_of)
    traced = str(jax.make_jaxpr(lambda *given: CALLS[case](*given))(X, ROW))
    assert asked == [case]
    assert (case.split()[0] in traced) == (ratio > 1), traced


@pytest.mark.usefixtures("unknown_gpu")
@pytest.mark.parametrize("case", CALLS)
def test_what_is_compared_runs(case, monkeypatch):
    """Both functions of a comparison, forward and backward, traced at its own size."""
    traced = []

    def trace(functions, arguments):
        for function in functions:
            out, _ = jax.eval_shape(partial(jax.vjp, function), *arguments)
            traced.append((function, jax.tree.leaves(out)))
        return [2.0, 1.0]

    monkeypatch.setattr(first_use, "seconds_of", trace)
    monkeypatch.setattr(first_use, "ELEMENTS", 1 << 16)
    jax.make_jaxpr(lambda *given: CALLS[case](*given))(X, ROW)
    assert COMPARISONS.known() == {case: 2.0}
    (_, one), (_, other) = traced
    assert [leaf.shape for leaf in one] == [leaf.shape for leaf in other]


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
