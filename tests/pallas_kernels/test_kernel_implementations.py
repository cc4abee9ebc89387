"""Implementations of LayerNorm-Modulate: one from here alone, how "auto" chooses, who may be."""

import ast
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernel_cases import assert_same_bits

import pallas_kernels
from pallas_kernels import layernorm_modulate, residual_layernorm_modulate, segmentation
from pallas_kernels.layernorm_modulate import (
    FusedImplementation,
    implementation_names,
    register_implementation,
    unregister_implementation,
)
from pallas_kernels.layernorm_modulate.operands import NormOperands, reference

PACKAGE = Path(pallas_kernels.__file__).parent
SPEC = PartitionSpec("data", "sequence", None)
IDS = np.repeat([[0, 1, -1, 3], [2, -1, -1, 0]], 4, axis=1)


class Mine(FusedImplementation):
    """Without residual sums; faster where the width is 64; notes the shapes that it is given."""

    name = "mine"

    def __init__(self):
        self.seen = []

    def unsupported_reason(self, operands, config):
        if operands.y is not None:
            return NotImplementedError("it adds no residual; use 'xla'")
        return super().unsupported_reason(operands, config)

    def faster_than_reference(self, operands, config):
        return operands.x.shape[-1] == 64

    def prepare_segments(self, segment_ids, table_rows, width, sharding):
        return {"padding": segment_ids < 0}

    def forward(self, operands, options, *, statistics):
        self.seen.append(("forward", operands.x.shape))
        if operands.prepared is not None:
            self.seen.append(("prepared", operands.prepared["padding"].shape))
        kept = operands.x[..., :3].astype(jnp.float32) if statistics else None
        _, out = reference(operands, options)
        return None, out, kept

    def backward(self, residuals, dh, dout, options):
        self.seen.append(("backward", residuals.h.shape))
        assert (dh, residuals.statistics.shape[-1]) == (None, 3)

        def run(h, scale, shift):
            operands = NormOperands(h, scale, shift, segment_ids=residuals.segment_ids)
            return reference(operands, options)[1]

        wide = residuals.scale.astype(jnp.float32)
        _, pullback = jax.vjp(run, residuals.h, wide, jnp.zeros_like(wide))
        dx, *tables = pullback(dout)
        return dx, None, tables if options.layout == "token" else jnp.stack(tables)


@pytest.fixture
def mine():
    implementation = Mine()
    register_implementation(implementation)
    yield implementation
    unregister_implementation("mine")


def arrays(layout, dim=64):
    """x, scale, shift and segment_ids."""
    table = {"row": (2, dim), "token": (2, 16, dim), "segment": (2, 4, dim)}[layout]
    rng = np.random.default_rng(0)
    drawn = [rng.normal(size=shape).astype(np.float32) for shape in ((2, 16, dim), table, table)]
    return *map(jnp.asarray, drawn), jnp.asarray(IDS) if layout == "segment" else None


def outputs_and_gradients(x, scale, shift, ids, **options):
    def loss(x, scale, shift, ids):
        out = layernorm_modulate(x, scale, shift, segment_ids=ids, **options)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, out), gradients = run(x, scale, shift, ids)
    return out, *gradients


def close(left, right):
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["mine", "auto"])
@pytest.mark.parametrize("layout", ["row", "token", "segment"])
def test_an_implementation_from_outside_runs_forward_and_backward(name, layout, mine):
    given = arrays(layout)
    found = outputs_and_gradients(*given, implementation=name)
    assert mine.seen == [("forward", (2, 16, 64)), ("backward", (2, 16, 64))]
    close(found, outputs_and_gradients(*given, implementation="xla"))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("name", "layout"), [("mine", "row"), ("auto", "row"), ("mine", "segment"), ("auto", "token")]
)
def test_it_runs_on_each_shard_of_a_mesh(name, layout, kind, mine):
    given = arrays(layout)
    expected = outputs_and_gradients(*given, implementation="xla")
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), (kind, kind), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, SPEC)
    x = jax.device_put(given[0], sharding)
    told = {"sharding": sharding} if kind == AxisType.Auto else {}
    run = partial(outputs_and_gradients, implementation=name, **told)
    with jax.set_mesh(mesh):
        found = run(x, *given[1:])
    assert ("forward", (1, 8, 64)) in mine.seen
    assert ("backward", (1, 8, 64)) in mine.seen
    close(found, expected)


def test_it_gets_what_it_prepared_of_the_segments(mine):
    x, scale, shift, ids = arrays("segment")
    prepared = segmentation(ids, 4, 64)
    found = outputs_and_gradients(x, scale, shift, prepared, implementation="mine")
    assert ("prepared", (2, 16)) in mine.seen
    close(found, outputs_and_gradients(x, scale, shift, ids, implementation="xla"))


def test_segments_prepared_before_it_was_registered_will_do():
    x, scale, shift, ids = arrays("segment")
    prepared = segmentation(ids, 4, 64)
    register_implementation(Mine())
    try:
        found = layernorm_modulate(x, scale, shift, segment_ids=prepared, implementation="mine")
    finally:
        unregister_implementation("mine")
    np.testing.assert_allclose(found, layernorm_modulate(x, scale, shift, segment_ids=ids))


def test_auto_takes_it_only_where_it_is_faster_and_can_run(mine):
    layernorm_modulate(*arrays("row", 32)[:3])
    x, scale, shift, _ = arrays("row")
    residual_layernorm_modulate(x, x, None, scale, shift)
    assert mine.seen == []
    layernorm_modulate(x, scale, shift)
    assert mine.seen == [("forward", (2, 16, 64))]


def test_by_name_it_says_what_it_cannot_do(mine):
    x, scale, shift, _ = arrays("row")
    with pytest.raises(NotImplementedError, match=r"^residual.*: 'mine' cannot run, it adds no"):
        residual_layernorm_modulate(x, x, None, scale, shift, implementation="mine")


def test_names_are_listed_and_taken_once(mine):
    assert implementation_names() == ("auto", "triton", "mosaic", "mine", "xla")
    x, scale, shift, _ = arrays("row")
    with pytest.raises(
        ValueError, match="'magic' is unknown; choose one of auto, triton, mosaic, mine"
    ):
        layernorm_modulate(x, scale, shift, implementation="magic")
    for name in ("mine", "xla", "auto"):
        other = Mine()
        other.name = name
        with pytest.raises(ValueError, match=f"'{name}' is taken"):
            register_implementation(other)


def test_auto_is_interpreted_as_the_kernels():
    x, scale, shift, _ = arrays("row", 40)
    auto, triton, xla = (
        outputs_and_gradients(x, scale, shift, None, **options)
        for options in (
            {"interpret": True},
            {"interpret": True, "implementation": "triton"},
            {"implementation": "xla"},
        )
    )
    assert_same_bits(auto, triton)
    close(auto, xla)


@pytest.mark.parametrize("name", ["xla", "mine"])
def test_what_cannot_be_interpreted_says_so(name, mine):
    x, scale, shift, _ = arrays("row")
    with pytest.raises(ValueError, match=rf"layernorm_modulate: '{name}' has nothing to interpret"):
        layernorm_modulate(x, scale, shift, implementation=name, interpret=True)


def test_a_jax_without_pallas_triton_runs_the_rest():
    script = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax.numpy as jnp
from pallas_kernels import layernorm_modulate, segmentation
x, row = jnp.ones((2, 3, 4)), jnp.ones((2, 4))
layernorm_modulate(x, row, row, segment_ids=segmentation(jnp.zeros((2, 3), int), 2, 4))
try:
    layernorm_modulate(x, row, row, implementation="triton")
except NotImplementedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"does not lower Pallas kernels through Triton", done.stdout)


def test_files_of_triton_are_imported_where_they_run():
    for path in PACKAGE.rglob("*.py"):
        if path.name.startswith("triton") or path.name == "primitive.py":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names]
                parts = [part for name in names for part in name.split(".")]
                assert not any(part.startswith("triton") for part in parts), path
