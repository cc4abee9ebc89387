"""LayerNorm-Modulate's kernels under transformations, lowered, and of arrays that a mesh splits."""

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import kernel_cases as cases
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import BF16, F32, LAYOUTS
from lowering import lowered_for_cuda

from pallas_kernels import devices, layernorm_modulate
from pallas_kernels.layernorm_modulate.operands import NormOperands, unsupported_sharding

pytestmark = pytest.mark.usefixtures("few_programs")


def stacked(count, **options):
    """Operands with a leading axis, to map over."""
    many = [cases.make((2, 5, 24), seed=n, **options) for n in range(count)]
    return jax.tree.map(lambda *values: jnp.stack(values), *many)


def compare(interpret, wrap, *arguments, atol=2e-5, rtol=2e-5, **options):
    """What a function of the implementation gives with the kernels, and with XLA."""
    kinds = (cases.implementation(kind, **options) for kind in (interpret, "xla"))
    ours, xla = (jax.jit(wrap(run))(*arguments) for run in kinds)
    cases.close(ours, xla, atol, rtol)


def total(outputs):
    """A number whose slopes differ from element to element."""
    return sum(jnp.sin(value).sum() for value in jax.tree.leaves(outputs))


def test_vmap_of_a_scale_alone_of_a_residual_nested_and_over_segments(interpret):
    def of_scale(run):
        slopes = jax.value_and_grad(lambda *arrays: total(run(NormOperands(*arrays))), (0, 1, 2))
        return jax.vmap(slopes, in_axes=(None, 0, None))

    def nested(run):
        return jax.vmap(jax.vmap(jax.value_and_grad(lambda operands: total(run(operands)))))

    x, _, shift, *_ = cases.make((2, 5, 24), seed=7)
    compare(interpret, of_scale, x, stacked(3).scale, shift)
    four = stacked(4, y_dtype=F32, gate=True)
    compare(interpret, nested, jax.tree.map(lambda v: v.reshape(2, 2, *v.shape[1:]), four))
    ids = [np.repeat([0, 1, -1], [5, 4, 3]), np.repeat([2, 0, 1], [1, 9, 2])]
    many = [cases.make((12, 24), (3, 24), ids=row, seed=n) for n, row in enumerate(ids)]
    operands = jax.tree.map(lambda *values: jnp.stack(values), *many)
    compare(interpret, lambda run: jax.vmap(lambda each: run(each)[1]), operands)


def test_checkpoints_in_a_scan_over_layers(interpret):
    layers = stacked(3)

    def wrap(run):
        def layer(x, table):
            return x + run(NormOperands(x, *table))[1], None

        def loss(x, tables):
            return jnp.sum(jnp.square(jax.lax.scan(jax.checkpoint(layer), x, tables)[0]))

        return jax.value_and_grad(loss, argnums=(0, 1))

    x = cases.make((2, 5, 24), seed=11).x
    compare(interpret, wrap, x, (layers.scale, layers.shift), atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "branch", "used", "x_dtype"),
    [
        *((layout, "none", used, F32) for layout in ("flat", "segment") for used in (0, 1)),
        *(("token", "plain", 0, BF16), ("segment", "plain", 0, F32)),
        *(("row", "gated", 0, BF16), ("token", "gated", 0, F32), ("segment", "gated", 0, BF16)),
    ],
)
def test_a_result_that_is_not_used_has_no_part_in_gradients(
    layout, branch, used, x_dtype, interpret
):
    y_dtype = None if branch == "none" else x_dtype
    operands = cases.make(
        **LAYOUTS[layout], x_dtype=x_dtype, y_dtype=y_dtype, gate=branch == "gated"
    )
    wave = jnp.sin(jnp.arange(operands.x.size)).reshape(operands.x.shape)

    def wrap(run):
        def loss(*arrays):
            each = NormOperands(*arrays, segment_ids=operands.segment_ids)
            return (run(each)[used].astype(F32) * wave).sum()

        return jax.grad(loss, tuple(n for n in range(5) if operands[n] is not None))

    limits = {"atol": 2e-2, "rtol": 2e-5} if x_dtype == BF16 else {"atol": 1e-6, "rtol": 2e-6}
    compare(interpret, wrap, *operands[:5], returns_x=True, **limits)


@pytest.mark.parametrize(
    ("saved", "residual", "forwards"),
    [(("out", "h"), False, 1), (("out", "h"), True, 1), ((), True, 2)],
)
def test_only_an_output_that_is_not_saved_is_computed_again(saved, residual, forwards):
    operands = cases.make(
        (2, 64, 96), x_dtype=BF16, y_dtype=BF16 if residual else None, gate=residual
    )
    run = cases.kernels_for_cuda()

    def block(operands):
        h, out = run(operands)
        out = jnp.sin(checkpoint_name(out, "out"))
        return out if h is None else out + jnp.sin(checkpoint_name(h, "h"))

    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    remat = jax.checkpoint(block, policy=policy)
    step = jax.value_and_grad(lambda each: remat(each).astype(F32).sum())
    found = Counter(cases.kernels_launched(lowered_for_cuda(step, operands)))
    assert (found["forward"], found["backward"]) == (forwards, 1)
    assert set(found) <= {"forward", "backward", "reduce", "statistics"}


def test_a_norm_that_is_not_used_is_not_run_backwards():
    operands = cases.make((2, 64, 96), (2, 3, 96), y_dtype=F32, gate=True, ids=np.zeros((2, 64)))
    run = cases.kernels_for_cuda()
    block = jax.checkpoint(lambda each: run(each)[0])

    def loss(floats):
        return jnp.sin(block(floats._replace(segment_ids=operands.segment_ids))).sum()

    floats = operands._replace(segment_ids=None)
    found = Counter(cases.kernels_launched(lowered_for_cuda(jax.grad(loss), floats)))
    assert found == {"forward": 1, "h_backward": 1, "reduce": 1}


@pytest.mark.parametrize(
    ("shape", "layout", "residual", "static"),
    [
        ((1, 500_000, 5120), "row", True, {}),
        ((5, 100_000, 8192), "row", False, {}),
        ((2, 37, 31), "row", True, {}),
        ((2, 37, 10_000), "row", True, {}),
        ((2, 4096, 1536), "token", True, {}),
        ((2, 4096, 1536), "segment", False, {}),
        ((2, 4096, 1536), "segment", True, {}),
    ],
    ids=str,
)
def test_it_lowers_for_cuda(shape, layout, residual, static):
    names = cases.kernels_launched(
        cases.both_lowered_for_cuda(cases.shapes_of(shape, layout, residual), **static)
    )
    assert names == ["forward", "backward"] + ([] if layout == "token" else ["reduce"])


def test_all_processes_lower_the_same_kernel():
    """Else the compilation cache of one is of no use to another."""
    script = (
        "import sys; sys.path += ['../..', '..']; import kernel_cases as cases; "
        "print(cases.both_lowered_for_cuda(cases.shapes_of((2, 512, 256), 'segment')))"
    )
    texts = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        command, folder = [sys.executable, "-c", script], Path(__file__).parent
        texts.add(subprocess.check_output(command, env=environment, cwd=folder))
    assert len(texts) == 1


SHAPE = (4, 16, 48)
GATED = {"shape": SHAPE, "y_dtype": F32, "gate": True}
CASES = {
    "row": {"shape": SHAPE},
    "residual": GATED,
    "token": GATED | {"table": SHAPE},
    "segment": GATED
    | {"table": (4, 3, 48), "ids": np.tile(np.repeat([0, 1, -1, 2], [5, 6, 2, 3]), (4, 1))},
    "flat": {"shape": (16, 48), "table": (3, 48), "ids": np.repeat([0, 1, -1, 2], [5, 6, 2, 3])},
    "blocks": GATED
    | {"table": (4, 3, 48), "ids": np.tile(np.repeat([0, 1, 2], [7, 7, 2]), (4, 1))},
}
BOTH, BATCH = P("data", "sequence"), P(("data", "sequence"))
SEQUENCE, FLAT = P(None, ("data", "sequence")), P("sequence")


def check_on_mesh(case, kind, spec, *, told, **options):
    """A compiled program, whose results on a mesh are those of XLA on one device.

    In the case "blocks", shards begin inside of blocks, and ids are not split as x is.
    """
    mesh = cases.mesh_of_four(kind, "data", "sequence")
    operands = cases.make(**CASES[case])
    cotangents = cases.cotangents_for(operands)
    sharding = NamedSharding(mesh, spec)
    of_tables = NamedSharding(mesh, {"token": spec, "flat": P()}.get(case, P(spec[0])))
    of_ids = NamedSharding(mesh, P()) if case == "blocks" else sharding
    places = dict.fromkeys(("scale", "shift", "gate"), of_tables) | {"segment_ids": of_ids}
    split = {
        name: None if each is None else jax.device_put(each, places.get(name, sharding))
        for name, each in operands._asdict().items()
    }
    arguments = NormOperands(**split), jax.device_put(cotangents, sharding)
    both = cases.with_gradients(
        partial(cases.public, sharding=sharding if told else None, **options)
    )
    with jax.set_mesh(mesh):
        compiled = both.lower(*arguments).compile()
        found = compiled(*arguments)
    expected = cases.gradients_of("xla")(operands, cotangents)
    cases.close(*(jax.tree.map(np.asarray, each) for each in (found, expected)))
    return compiled


@pytest.mark.parametrize(
    ("case", "kind", "spec", "told", "choice"),
    [
        *(("row", "explicit", BOTH, True, 1), ("token", "explicit", BOTH, True, 0)),
        *(("segment", "auto", BOTH, True, 1), ("blocks", "auto", SEQUENCE, True, 1)),
        *(("residual", kind, SEQUENCE, True, 1) for kind in ("auto", "explicit")),
        ("residual", "explicit", BATCH, True, 0),
        *(("residual", "auto", BOTH, False, "xla"), ("token", "explicit", BOTH, False, "auto")),
        *(("segment", "auto", BOTH, told, way) for told, way in ((True, "xla"), (False, "auto"))),
        *(("segment", "explicit", BOTH, False, "xla"), ("flat", "auto", FLAT, True, "xla")),
        ("blocks", "explicit", SEQUENCE, False, "xla"),
    ],
    ids=str,
)
def test_on_a_mesh_kernels_gather_nothing_of_what_is_split(
    case, kind, spec, told, choice, interpret
):
    """`choice`: an implementation, or how often the kernels add up over devices."""
    if choice == "auto" and jax.default_backend() == "gpu":
        pytest.skip("the choice may fall on the kernels")
    of_kernels = isinstance(choice, int)
    options = cases.kernels(interpret) if of_kernels else {"implementation": choice}
    compiled = check_on_mesh(case, kind, spec, told=told, **options)
    assert not of_kernels or cases.collectives(compiled) == (0, choice)


def test_axes_that_a_kernel_cannot_see_are_named():
    x, row = jnp.ones((2, 16, 8)), jnp.ones((2, 8))
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), (AxisType.Explicit, AxisType.Auto))
    split = jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"Auto axes \['sequence'\]"):
        layernorm_modulate(split, row, row, interpret=True)
    mesh, part = cases.mesh_of_four("auto", "data", "sequence"), P(None, "sequence")
    split = {"mesh": mesh, "in_specs": (part, P()), "out_specs": part}
    mapped = jax.shard_map(  # which checks how values vary
        lambda x, row: layernorm_modulate(x, row, row, interpret=True), **split
    )
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        mapped(x, row)


@pytest.mark.parametrize(
    ("kind", "spec", "told", "shape", "error", "words"),
    [
        (AxisType.Explicit, P("a"), None, SHAPE, type(None), "None"),
        (AxisType.Auto, P("a"), P("a"), SHAPE, type(None), "None"),
        (AxisType.Auto, P("a"), None, SHAPE, ValueError, "sharding="),
        (AxisType.Explicit, P(None, None, "a"), None, SHAPE, NotImplementedError, "over a,"),
        (AxisType.Auto, P(), P(None, "a"), (4, 15, 48), ValueError, "15"),
    ],
    ids=str,
)
def test_what_a_trace_can_see_of_a_mesh(kind, spec, told, shape, error, words):
    mesh, found = jax.make_mesh((2,), ("a",), (kind,), devices=jax.devices()[:2]), []

    def look(x):
        seen = devices.visible_sharding(x) if told is None else NamedSharding(mesh, told)
        found.append(unsupported_sharding(x, seen))
        return x

    with jax.set_mesh(mesh):
        jax.jit(look).trace(jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec)))
    assert isinstance(found[0], error)
    assert words in str(found[0])
