import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import (
    F32,
    cotangents_for,
    gradients_of,
    implementation,
    make,
    public,
    with_gradients,
)

from pallas_kernels import devices
from pallas_kernels.layernorm_modulate.operands import NormOperands, unsupported_sharding

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SHAPE = (4, 16, 48)
SPECS = {
    "both": P("data", "sequence"),
    "batch": P(("data", "sequence")),
    "sequence": P(None, ("data", "sequence")),
}


@pytest.fixture(params=KINDS)
def mesh(request):
    kind = KINDS[request.param]
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    return jax.make_mesh((2, 2), ("data", "sequence"), (kind, kind), devices=jax.devices()[:4])


def placed(operands, mesh, spec):
    batch = spec[0]
    specs = {
        "x": P(*spec),
        "y": P(*spec),
        "segment_ids": P(*spec),
        "scale": P(batch),
    }
    specs |= {"shift": specs["scale"], "gate": specs["scale"]}
    if operands.scale.shape == operands.x.shape:
        specs |= dict.fromkeys(("scale", "shift", "gate"), P(*spec))
    return NormOperands(
        **{
            name: None if v is None else jax.device_put(v, NamedSharding(mesh, specs[name]))
            for name, v in operands._asdict().items()
        }
    )


def close(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=2e-5)


def cases():
    ids = np.tile(np.repeat([0, 1, -1, 2], [5, 6, 2, 3]), (4, 1))
    return {
        "row": make(SHAPE),
        "residual": make(SHAPE, y_dtype=F32, gate=True),
        "token": make(SHAPE, SHAPE, y_dtype=F32, gate=True),
        "segment": make(SHAPE, (4, 3, 48), y_dtype=F32, gate=True, ids=ids),
    }


def on_mesh(both, operands, cotangents, mesh, spec):
    split = placed(operands, mesh, spec)
    sharding = NamedSharding(mesh, P(*spec))
    cts = jax.tree.map(lambda value: jax.device_put(value, sharding), cotangents)
    with jax.set_mesh(mesh):
        return both.lower(split, cts).compile(), (split, cts)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("case", ["row", "residual", "token", "segment"])
def test_split_over_batch_and_sequence(case, mesh, interpret):
    operands = cases()[case]
    cotangents = cotangents_for(operands)
    expected = gradients_of("xla")(operands, cotangents)
    spec = SPECS["both"]
    sharding = NamedSharding(mesh, P(*spec, None))
    both = with_gradients(implementation(interpret, sharding))
    compiled, arguments = on_mesh(both, operands, cotangents, mesh, spec)
    close(compiled(*arguments), expected)
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    assert "collective-permute" not in text
    reductions = re.findall(r"= [^=]* all-reduce(?:-start)?\(", text)
    assert len(reductions) == (0 if case == "token" else 1)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("spec", ["batch", "sequence"])
def test_split_over_one_of_them(spec, mesh, interpret):
    operands = cases()["residual"]
    cotangents = cotangents_for(operands)
    expected = gradients_of("xla")(operands, cotangents)
    sharding = NamedSharding(mesh, P(*SPECS[spec]))
    both = with_gradients(implementation(interpret, sharding))
    compiled, arguments = on_mesh(both, operands, cotangents, mesh, SPECS[spec])
    close(compiled(*arguments), expected)
    text = compiled.as_text()
    assert "all-gather" not in text
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == (spec == "sequence")


@pytest.mark.parametrize(("choice", "told"), [("xla", False), ("xla", True), ("auto", False)])
@pytest.mark.parametrize("case", ["row", "residual", "token", "segment"])
def test_public_functions_on_a_mesh(case, told, choice, mesh):
    if choice == "auto" and jax.default_backend() == "gpu":
        pytest.skip("the choice may fall on the kernels")
    operands = cases()[case]
    cotangents = cotangents_for(operands)
    expected = gradients_of("xla")(operands, cotangents)
    sharding = NamedSharding(mesh, SPECS["both"]) if told else None
    both = with_gradients(partial(public, sharding=sharding, implementation=choice))
    compiled, arguments = on_mesh(both, operands, cotangents, mesh, SPECS["both"])
    close(compiled(*arguments), expected)


@pytest.mark.parametrize("told", [False, True])
def test_flat_rows_on_a_mesh(told, mesh):
    operands = make((16, 48), (3, 48), ids=np.repeat([0, 1, -1, 2], [5, 6, 2, 3]))
    expected = gradients_of("xla")(operands, cotangents_for(operands))
    sharding = NamedSharding(mesh, P("sequence"))
    split = operands._replace(
        x=jax.device_put(operands.x, sharding),
        segment_ids=jax.device_put(operands.segment_ids, sharding),
        scale=jax.device_put(operands.scale, NamedSharding(mesh, P())),
        shift=jax.device_put(operands.shift, NamedSharding(mesh, P())),
    )
    cotangents = jax.tree.map(lambda v: jax.device_put(v, sharding), cotangents_for(operands))
    with jax.set_mesh(mesh):
        run = implementation("xla", sharding if told else None)
        found = with_gradients(run)(split, cotangents)
    close(found, expected)


def reason_in_a_trace(mesh, x_spec, sharding, shape=SHAPE):
    found = []

    def look(x):
        seen = devices.visible_sharding(x) if sharding is None else sharding
        found.append(unsupported_sharding(x, seen))
        return x

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros(shape), NamedSharding(mesh, x_spec))
        jax.jit(look).trace(x)
    return found[0]


def test_an_explicit_mesh_shows_how_x_is_split():
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), devices=jax.devices()[:4])
    assert reason_in_a_trace(mesh, P("data", "sequence"), None) is None


def test_an_auto_mesh_needs_to_be_told():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    found = reason_in_a_trace(mesh, P("data"), None)
    assert isinstance(found, ValueError)
    assert "sharding=" in str(found)
    assert reason_in_a_trace(mesh, P("data"), NamedSharding(mesh, P("data"))) is None


def test_a_split_width_is_refused():
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    found = reason_in_a_trace(mesh, P(None, None, "model"), None)
    assert isinstance(found, NotImplementedError)
    assert "model" in str(found)


def test_uneven_shards_are_refused():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    found = reason_in_a_trace(mesh, P(), NamedSharding(mesh, P(None, "data")), (4, 15, 48))
    assert isinstance(found, ValueError)
    assert "15" in str(found)
