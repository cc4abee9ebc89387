"""Inputs, a float64 oracle and tolerances for the tests of LayerNorm-Modulate's kernels."""

import itertools
import json
import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from lowering import lowered_for_cuda

from pallas_kernels import layernorm_modulate, residual_layernorm_modulate
from pallas_kernels.layernorm_modulate import tuning
from pallas_kernels.layernorm_modulate.implementations import TritonNorm
from pallas_kernels.layernorm_modulate.operands import NormOperands, normalise
from pallas_kernels.op import Call

EPS = 1e-6
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

ROUNDING = {jnp.dtype(BF16): 2.0**-8, jnp.dtype(F16): 2.0**-11, jnp.dtype(F32): 2.0**-24}
"""One rounding to each dtype, relative."""
SMALLEST = {jnp.dtype(BF16): 0.0, jnp.dtype(F16): 2.0**-25, jnp.dtype(F32): 0.0}
"""Half the spacing of subnormals, where they are coarse."""
FLOAT32 = 2.5e-7
"""Error of float32 arithmetic on rows of unit scale; it grows with √D, and √rows in sums."""

NAMES = ("x", "scale", "shift", "y", "gate")
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels_h200.json"


def measured():
    """Microseconds by kernel, direction, width and implementation."""
    fields = ("kernel", "direction", "width", "implementation")
    found = json.loads(MEASURED.read_text())["cases"]
    return {tuple(each[name] for name in fields): each["us"] for each in found}


def tolerance(dtype, expected, dim, *, rows=1, condition=1.0):
    arithmetic = FLOAT32 * (1 + np.sqrt(dim) / 16) * np.sqrt(rows) * condition
    dtype = jnp.dtype(dtype)
    return ROUNDING[dtype] * np.abs(expected) + SMALLEST[dtype] + arithmetic


def examples(count):
    return settings(max_examples=count, deadline=None, derandomize=True)


def numpy64(value):
    return None if value is None else np.asarray(value).astype(np.float64)


def assert_within(actual, expected, bound, what=""):
    actual = numpy64(actual)
    assert actual.shape == expected.shape, what
    error = np.abs(actual - expected)
    ratio = np.divide(error, bound, out=np.zeros_like(error), where=error != 0)
    worst = np.max(ratio, initial=0.0)
    assert worst <= 1.0, f"{what}: {worst:.3g} times the tolerance"


def check_within(found, expected, limits):
    """Whether arrays have the shapes of others and differ by no more than limits of each."""
    for value, wanted, limit in zip(found, expected, limits, strict=True):
        assert_within(value, wanted, limit)


def close(left, right, atol=2e-5, rtol=2e-5):
    """Compares trees of float32."""
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def assert_same_bits(left, right):
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    for one, other in leaves:
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# Running the kernels -----------------------------------------------------------------------------


def kernels(interpret):
    """Options of a function that run its Triton kernels."""
    return {"interpret": True} if interpret else {"implementation": "triton"}


def mesh_of_four(kind, *names):
    """A mesh of 2 × 2 devices whose axes are of a kind, "auto" or "explicit"."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    kinds = ({"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind],) * 2
    return jax.make_mesh((2, 2), names, kinds, devices=jax.devices()[:4])


def collectives(compiled):
    """How often a program moves what is split, and how often it adds up over devices."""
    found = re.findall(r" (all-[a-z]+|collective-permute)(?:-start)?\(", compiled.as_text())
    sums = found.count("all-reduce")
    return len(found) - sums, sums


def public(operands, *, returns_x=False, **options):
    """(h or None, out) of the public function that takes such operands.

    Without y, h is x itself if `returns_x`.
    """
    x, scale, shift, y, gate, ids, _ = operands
    options = {"segment_ids": ids} | options
    if y is None and not returns_x:
        return None, layernorm_modulate(x, scale, shift, **options)
    return residual_layernorm_modulate(x, y, gate, scale, shift, **options)


def implementation(interpret, sharding=None, **options):
    """A function of NormOperands: the Triton kernels, or what has a name such as "xla"."""
    chosen = {"implementation": "triton", "interpret": interpret}
    if isinstance(interpret, str):
        chosen = {"implementation": interpret}
    return lambda operands: public(operands, sharding=sharding, **chosen, **options)


def with_gradients(run):
    """(h, out) and the gradients of x, scale, shift, y and gate, as one compiled function."""

    def both(operands, cotangents):
        ids = operands.segment_ids

        def floats(*arrays):
            return run(NormOperands(*arrays, segment_ids=ids))

        outputs, pullback = jax.vjp(floats, *operands[:5])
        return outputs, pullback(cotangents)

    return jax.jit(both)


def gradients_of(interpret, **options):
    """`with_gradients` of an implementation; tests of equal shapes share what it compiles."""
    return _gradients_of(tuning.blocks_for, interpret, **options)


@cache
def _gradients_of(blocks_for, interpret, **options):
    # A test may replace blocks_for, of which the compiled program would know nothing.
    return with_gradients(implementation(interpret, **options))


def make(
    shape, table=None, *, x_dtype=F32, modulation=F32, y_dtype=None, gate=False, ids=None,
    seed=0, mean=0.0, spread=1.0,
):  # fmt: skip
    """Random operands; `table` is the shape of scale, [B, D] unless given."""
    rng = np.random.default_rng(seed)
    table = (*shape[:-2], shape[-1]) if table is None else table

    def draw(dtype, size, centre=0.0, width=1.0):
        return jnp.asarray(centre + width * rng.normal(size=size).astype(np.float32), dtype)

    x, scale = draw(x_dtype, shape, mean, spread), draw(modulation, table, 0.0, 0.5)
    shift, y = draw(modulation, table), None if y_dtype is None else draw(y_dtype, shape)
    gate = draw(modulation, table) if gate else None
    ids = None if ids is None else jnp.asarray(ids, jnp.int32)
    return NormOperands(x, scale, shift, y, gate, ids)


IDS = np.repeat([[0, 1, -1, 3], [2, -1, -1, 0]], 4, axis=1)
LAYOUTS = {
    "row": {"shape": (2, 16, 40)},
    "flat": {"shape": (16, 40), "table": (1, 40)},
    "token": {"shape": (2, 16, 40), "table": (2, 16, 40)},
    "segment": {"shape": (2, 16, 40), "table": (2, 4, 40), "ids": IDS},
}
"""Arguments of `make`: a row of scale for each row of x, for all, for each token or segment."""


def cotangents_for(operands, residual_dtype=None, seed=99):
    """Random cotangents of h (None without y) and of the modulated value."""
    rng = np.random.default_rng(seed)
    y, shape = operands.y, operands.x.shape
    draw = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]
    if y is None:
        return None, jnp.asarray(draw[1], operands.x.dtype)
    h_dtype = operands.x.dtype if residual_dtype is None else residual_dtype
    return jnp.asarray(draw[0], h_dtype), jnp.asarray(draw[1], y.dtype)


# The oracle --------------------------------------------------------------------------------------


class Oracle:
    """Float64 by hand. `h` is the kernel's own, because the norm is that of the rounded sum.

    Arrays are [tokens, D]; `row` is a token's row of the flattened tables, −1 for padding.
    """

    def __init__(self, operands, h=None, eps=EPS):
        self.operands, self.dim = operands, operands.x.shape[-1]
        self.tokens, self.rows = (a.size // self.dim for a in (operands.x, operands.scale))
        number = np.arange(self.tokens)
        self.row = number // (self.tokens // self.rows)
        if operands.segment_ids is not None:
            ids, of_table = np.asarray(operands.segment_ids).ravel(), operands.scale.shape[-2]
            own = number // (self.tokens // (self.rows // of_table)) * of_table
            self.row = np.where(ids < 0, -1, ids + own)
        self.padding = (self.row < 0)[:, None]
        tables = (operands.scale, operands.shift, operands.gate)
        own = np.maximum(self.row, 0)
        self.scale, self.shift, self.gate = (v if v is None else self.flat(v)[own] for v in tables)
        self.x = self.clear(self.flat(operands.x))
        self.y = None if operands.y is None else self.clear(self.flat(operands.y))
        self.h = self.x if h is None else self.clear(self.flat(h))
        mean = self.h.mean(-1, keepdims=True)
        self.rstd = 1 / np.sqrt(((self.h - mean) ** 2).mean(-1, keepdims=True) + eps)
        self.normed = (self.h - mean) * self.rstd
        # How much a relative error of h's elements grows in the normed row.
        self.condition = 1 + np.abs(self.h).max(-1, keepdims=True) * self.rstd

    def flat(self, value):
        return numpy64(value).reshape(-1, self.dim)

    def clear(self, value):
        return np.where(self.padding, 0.0, value)

    def check(self, name, actual, expected, *, like, **bound):
        """`like`: an operand whose shape it must have; `bound`: of `tolerance`."""
        assert actual.shape == like.shape, name
        bound = tolerance(actual.dtype, expected, self.dim, **bound)
        assert_within(self.flat(actual), expected, bound, name)

    def check_outputs(self, h, out):
        if h is not None:
            branch = self.y if self.gate is None else self.gate * self.y
            size = self.clear(np.abs(self.x) + np.abs(branch))
            expected = self.clear(self.x + branch)
            bound = tolerance(h.dtype, expected, 1, condition=size)
            assert_within(self.flat(h), expected, bound, "h")
        expected = self.clear(self.normed * (1 + self.scale) + self.shift)
        # An element's error is that of the normed row times its own gain.
        condition = self.condition * np.abs(1 + self.scale) + np.abs(self.shift)
        self.check("out", out, expected, like=self.operands.x, condition=condition)

    def check_gradients(self, gradients, dh, dout):
        dout = self.clear(self.flat(dout))
        gained = dout * (1 + self.scale)
        slope = (gained * self.normed).mean(-1, keepdims=True)
        dx = self.rstd * (gained - gained.mean(-1, keepdims=True) - self.normed * slope)
        size = self.rstd * (np.abs(gained).max(-1, keepdims=True) + np.abs(self.normed * slope))
        dx = self.clear(dx if dh is None else dx + self.flat(dh))
        noise = self.clear(size) * self.condition / 3 + 1.0
        gate = 1.0 if self.gate is None else self.gate
        tokens = {"x": (dx, noise)}
        # The largest term of a sum decides: √rows such errors add up at random.
        tables = {"scale": (dout * self.normed, np.abs(dout) * self.condition)}
        tables["shift"] = dout, np.abs(dout)
        if self.y is not None:
            tokens["y"] = self.clear(dx * gate), noise * np.abs(gate)
        if self.gate is not None:
            tables["gate"] = dx * self.y, noise * np.abs(self.y)
        for name, actual in zip(NAMES, gradients, strict=True):
            if name not in tokens | tables:
                assert actual is None, name
                continue
            like = getattr(self.operands, name)
            assert actual.dtype == like.dtype, name
            if name in tokens:
                expected, condition = tokens[name]
                bound = {"condition": condition + 1e-30}
            else:
                each, term = tables[name]
                expected, used = np.zeros((self.rows, self.dim)), ~self.padding[:, 0]
                np.add.at(expected, self.row[used], each[used])
                bound = {"condition": 1 + np.max(self.clear(term), initial=0)}
                bound["rows"] = 1 if self.rows == self.tokens else self.tokens
            self.check(f"d{name}", actual, expected, like=like, **bound)


def check(operands, outputs, gradients=None, cotangents=None, *, eps=EPS):
    """Compares outputs, and gradients where given, with the oracle."""
    oracle = Oracle(operands, outputs[0], eps)
    oracle.check_outputs(*outputs)
    if gradients is not None:
        oracle.check_gradients(gradients, *cotangents)


def run_and_check(operands, interpret, **static):
    """Forward and backward of one case against the oracle; returns what the kernels gave."""
    cotangents = cotangents_for(operands, static.get("residual_dtype"))
    outputs, gradients = gradients_of(interpret, **static)(operands, cotangents)
    check(operands, outputs, gradients, cotangents, eps=static.get("eps", EPS))
    return outputs, gradients


@st.composite
def layouts(draw, rows, length, segments):
    """Ids of rows of `length` tokens: segments in any order, padding anywhere."""
    found = []
    for _ in range(rows):
        cuts = draw(st.sets(st.integers(1, length - 1), max_size=segments - 1))
        order = iter(draw(st.permutations(range(segments))))
        row = np.empty(length, np.int32)
        for start, stop in itertools.pairwise([0, *sorted(cuts), length]):
            row[start:stop] = -1 if draw(st.booleans()) and draw(st.booleans()) else next(order)
        found.append(row)
    return np.stack(found)


# Lowering ----------------------------------------------------------------------------------------


def kernels_for_cuda(kernels=TritonNorm, *, residual_dtype=None):
    """`implementation` for a GPU that need not be there."""

    def run(operands):
        normal, options = normalise("test", operands, eps=EPS, residual_dtype=residual_dtype)
        return kernels().run(normal, Call(options, None))

    return run


def shapes_of(shape, layout="row", residual=True, dtype=BF16):
    """The operands' shapes alone."""
    batch, seq_len, dim = shape
    table = {"row": (batch, dim), "token": shape, "segment": (batch, 64, dim)}[layout]
    x, modulation = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(table, F32)
    ids = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32) if layout == "segment" else None
    branch = (x, modulation) if residual else (None, None)
    return NormOperands(x, modulation, modulation, *branch, segment_ids=ids)


def both_lowered_for_cuda(operands, kernels=TritonNorm, **static):
    """The text of forward and backward for shapes of operands."""
    run = kernels_for_cuda(kernels, **static)

    def both(operands, cotangents):
        outputs, pull = jax.vjp(lambda *a: run(NormOperands(*a, *operands[5:])), *operands[:5])
        return outputs, pull(cotangents)

    h = operands.y
    if h is not None:
        h = jax.ShapeDtypeStruct(h.shape, static.get("residual_dtype") or h.dtype)
    return lowered_for_cuda(both, operands, (h, operands.x))


def kernels_launched(module, function="layernorm_modulate"):
    """Names of a function's kernels in a lowered module, once for each launch in its text."""
    calls = [line for line in module.splitlines() if "custom_call" in line and "triton" in line]
    names = [re.search(r'\bname = "(\w+)"', line) for line in calls]
    assert all(names), "a kernel without a name"
    return [name.group(1).removeprefix(f"{function}_") for name in names]
