from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from kernel_cases import (
    BF16,
    F32,
    cotangents_for,
    implementation,
    kernels_for_cuda,
    kernels_launched,
    lowered_for_cuda,
    make,
)

from pallas_kernels.layernorm_modulate.operands import NormOperands

pytestmark = pytest.mark.usefixtures("few_programs")


def close(left, right, atol=2e-5):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=atol)


def stacked(count, **options):
    """Operands with a leading axis, to map over."""
    many = [make((2, 5, 24), seed=n, **options) for n in range(count)]
    return jax.tree.map(lambda *values: jnp.stack(values), *many)


def both_ways(interpret, wrap):
    """What a function of the implementation gives with the kernels, and with XLA."""
    return [jax.jit(wrap(implementation(kind))) for kind in (interpret, "xla")]


@pytest.mark.parametrize("mapped", [("x",), ("x", "scale"), ("scale",), ("x", "scale", "shift")])
def test_vmap(mapped, interpret):
    many, one = stacked(3), make((2, 5, 24), seed=7)
    operands = [getattr(many if name in mapped else one, name) for name in ("x", "scale", "shift")]
    axes = tuple(0 if name in mapped else None for name in ("x", "scale", "shift"))

    def wrap(run):
        def loss(*arrays):
            return jnp.sum(jnp.sin(run(NormOperands(*arrays))[1]))

        return jax.vmap(jax.value_and_grad(loss, argnums=(0, 1, 2)), in_axes=axes)

    kernel, xla = both_ways(interpret, wrap)
    close(kernel(*operands), xla(*operands))


def test_nested_vmap_of_a_residual(interpret):
    four = stacked(4, y_dtype=F32, gate=True)
    operands = jax.tree.map(lambda v: v.reshape(2, 2, *v.shape[1:]), four)

    def wrap(run):
        def loss(operands):
            h, out = run(operands)
            return jnp.sum(jnp.sin(h) * jnp.cos(out))

        return jax.vmap(jax.vmap(jax.value_and_grad(loss)))

    kernel, xla = both_ways(interpret, wrap)
    close(kernel(operands), xla(operands))


def test_vmap_over_segments(interpret):
    ids = [np.repeat([0, 1, -1], [5, 4, 3]), np.repeat([2, 0, 1], [1, 9, 2])]
    many = [make((12, 24), (3, 24), ids=row, seed=n) for n, row in enumerate(ids)]
    operands = jax.tree.map(lambda *values: jnp.stack(values), *many)
    kernel, xla = both_ways(interpret, lambda run: jax.vmap(lambda each: run(each)[1]))
    close(kernel(operands), xla(operands))


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(remat, interpret):
    layers = stacked(3)
    x = make((2, 5, 24), seed=11).x

    def wrap(run):
        def layer(x, table):
            return x + run(NormOperands(x, *table))[1], None

        def loss(x, tables):
            body = jax.checkpoint(layer) if remat else layer
            return jnp.sum(jnp.square(jax.lax.scan(body, x, tables)[0]))

        return jax.value_and_grad(loss, argnums=(0, 1))

    kernel, xla = both_ways(interpret, wrap)
    close(kernel(x, (layers.scale, layers.shift)), xla(x, (layers.scale, layers.shift)), 1e-4)


def test_grad_without_jit(interpret):
    operands = make((2, 5, 24))

    def gradient(run):
        return jax.grad(lambda x: run(operands._replace(x=x))[1].sum())(operands.x)

    close(gradient(implementation(interpret)), gradient(implementation("xla")))


def checkpointed(saved, residual):
    """A loss whose norm's outputs are saved under names, or not; and what it is a function of."""
    operands = make((2, 64, 96), x_dtype=BF16, y_dtype=BF16 if residual else None, gate=residual)
    run = kernels_for_cuda()

    def block(operands):
        h, out = run(operands)
        out = jnp.sin(checkpoint_name(out, "out"))
        return out if h is None else out + jnp.sin(checkpoint_name(h, "h"))

    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    remat = jax.checkpoint(block, policy=policy)
    return jax.value_and_grad(lambda each: remat(each).astype(F32).sum()), operands


def launches(saved, residual):
    return Counter(kernels_launched(lowered_for_cuda(*checkpointed(saved, residual))))


@pytest.mark.parametrize("residual", [False, True])
def test_a_plain_call_launches_each_kernel_once(residual):
    operands = make((2, 64, 96), y_dtype=F32 if residual else None, gate=residual)
    run = kernels_for_cuda()
    assert kernels_launched(lowered_for_cuda(run, operands)) == ["forward"]

    def pull(operands, cotangents):
        outputs, pullback = jax.vjp(run, operands)
        return outputs, pullback(cotangents)

    text = lowered_for_cuda(pull, operands, cotangents_for(operands))
    assert Counter(kernels_launched(text)) == {"forward": 1, "backward": 1, "reduce": 1}


@pytest.mark.parametrize("residual", [False, True])
def test_a_saved_output_is_not_computed_again(residual):
    found = launches(("out", "h"), residual)
    assert (found["forward"], found["backward"]) == (1, 1)
    assert set(found) <= {"forward", "backward", "reduce", "statistics"}


@pytest.mark.parametrize("residual", [False, True])
def test_an_output_that_is_not_saved_is_computed_again(residual):
    found = launches((), residual)
    assert (found["forward"], found["backward"]) == (2, 1)


@pytest.mark.parametrize("saved", [("out",), ("out", "h"), ()])
def test_checkpointed_gradients_are_the_same(saved, interpret):
    operands = make((2, 5, 24), y_dtype=F32, gate=True)
    run = implementation(interpret)

    def block(operands):
        h, out = run(operands)
        return jnp.sin(checkpoint_name(out, "out")) + jnp.sin(checkpoint_name(h, "h"))

    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    plain, remat = (
        jax.jit(jax.grad(lambda each, f=f: f(each).sum()))(operands)
        for f in (block, jax.checkpoint(block, policy=policy))
    )
    close(plain, remat, 1e-6)


IDS = np.repeat([[0, 1, -1, 3], [2, -1, -1, 0]], 4, axis=1)
SUMS = {
    "row": {"shape": (2, 16, 24)},
    "token": {"shape": (2, 16, 24), "table": (2, 16, 24)},
    "segment": {"shape": (2, 16, 24), "table": (2, 4, 24), "ids": IDS},
}


@pytest.mark.parametrize(
    ("layout", "gated", "x_dtype"),
    [
        *(("row", False, F32), ("token", False, BF16), ("segment", False, F32)),
        *(("row", True, BF16), ("token", True, F32), ("segment", True, BF16)),
    ],
)
def test_where_the_sum_alone_is_used_the_norm_has_no_part(layout, gated, x_dtype, interpret):
    operands = make(**SUMS[layout], x_dtype=x_dtype, y_dtype=x_dtype, gate=gated)
    wave = jnp.sin(jnp.arange(operands.x.size)).reshape(operands.x.shape)

    def gradients(how):
        def loss(*arrays):
            each = NormOperands(*arrays, segment_ids=operands.segment_ids)
            return (implementation(how)(each)[0].astype(F32) * wave).sum()

        places = tuple(n for n in range(5) if operands[n] is not None)
        return jax.jit(jax.grad(loss, places))(*operands[:5])

    close(gradients(interpret), gradients("xla"), 2e-2 if x_dtype == BF16 else 1e-6)


def test_a_norm_that_is_not_used_is_not_run_backwards():
    operands = make((2, 64, 96), (2, 3, 96), y_dtype=F32, gate=True, ids=np.zeros((2, 64)))
    run = kernels_for_cuda()
    block = jax.checkpoint(lambda each: run(each)[0])
    floats = operands._replace(segment_ids=None)

    def loss(floats):
        return jnp.sin(block(floats._replace(segment_ids=operands.segment_ids))).sum()

    found = Counter(kernels_launched(lowered_for_cuda(jax.grad(loss), floats)))
    assert found == {"forward": 1, "h_backward": 1, "reduce": 1}
