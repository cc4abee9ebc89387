"""Attention over samples that are split between ranks equals that over whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from alload_jax.models.common.attention import attention
from alload_jax.models.common.segments import SplitRows, segments_of
from alload_jax.sharding.mesh import BATCH_AXES, MeshConfig, make_mesh

TOKENS, REGION, HEADS = 64, 24, 4


def spans(rows, tokens, slots=5):
    table = np.zeros((2, len(rows), slots), np.int32)
    for row, parts in enumerate(rows):
        for slot, part in enumerate(parts):
            table[:, row, slot] = part
    return segments_of(table, tokens)


def split_rows(context, region=REGION):
    """Odd lengths, one token, and borders of ranks inside samples."""
    long = context * region
    joint = [(0, 31), (31, 1), (32, long - 39), (long - 7, 7)]
    behind = TOKENS - region
    whole = [[(0, 17), (17, behind - 17)] if rank % 2 else [(0, behind)] for rank in range(context)]
    if not behind:
        whole = [[]] * context
    return (
        joint,
        whole,
        SplitRows(
            spans(whole, behind),
            spans([joint] * context, long),
            region,
            (((0, 2), (max(1, behind), 0)), ((0, len(joint)), (long, 0))),
        ),
    )


def of_samples(x, joint, whole, region):
    """Each sample's tokens of [context, TOKENS, ...]."""
    together = x[:, :region].reshape(-1, *x.shape[2:])
    yield from (together[begin : begin + length] for begin, length in joint)
    for row, parts in enumerate(whole):
        yield from (x[row, region + b : region + b + n] for b, n in parts)


def alone(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k) / np.sqrt(q.shape[-1]), axis=-1)
    return jnp.einsum("hst,thd->shd", weights, v)


def check(context, region, head_dim, dtype, tolerance, axes):
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[: int(np.prod(list(axes.values())))])
    sharding = NamedSharding(mesh, jax.P(BATCH_AXES))
    joint, whole, rows = split_rows(context, region)
    draw = np.random.default_rng(0).normal(size=(4, context, TOKENS, HEADS, head_dim))
    *heads, weight = jnp.asarray(draw, dtype)

    def split(q, k, v):
        found = attention(q, k, v, segments=rows, sharding=sharding)
        return jnp.sum(found.astype(jnp.float32) * weight), found

    def whole_ones(q, k, v):
        parts = [of_samples(x, joint, whole, region) for x in (q, k, v, weight)]
        return sum(jnp.sum(alone(*qkv) * w) for *qkv, w in zip(*parts, strict=True))

    placed = [jax.device_put(x, sharding) for x in heads]
    run = jax.jit(jax.value_and_grad(split, argnums=(0, 1, 2), has_aux=True))
    (_, output), grads = run(*placed)
    exact = [x.astype(jnp.float32) for x in heads]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.grad(whole_ones, argnums=(0, 1, 2)))(*exact)
        outputs = of_samples(np.asarray(output, np.float32), joint, whole, region)
        qkv = zip(*(of_samples(x, joint, whole, region) for x in exact), strict=True)
        for ours, theirs in zip(outputs, (alone(*each) for each in qkv), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(grads, expected, strict=True):
        distance = np.linalg.norm(np.asarray(ours, np.float32) - theirs)
        assert distance <= tolerance * np.linalg.norm(theirs)


@pytest.mark.skipif(
    len(jax.devices()) < 8 or jax.default_backend() != "cpu", reason="needs 8 CPU devices"
)
@pytest.mark.parametrize(
    ("context", "region", "axes"),
    [
        (2, REGION, {"context": 2}),
        (4, REGION, {"context": 4}),
        (2, TOKENS, {"context": 2}),
        (2, REGION, {"context": 2, "tensor": 2}),
    ],
)
def test_split_samples_attend_as_whole_ones(context, region, axes):
    check(context, region, 6, jnp.float32, 1e-5, axes)


@pytest.mark.gpu
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
@pytest.mark.parametrize("region", [REGION, TOKENS])
def test_cudnn_on_two_gpus_agrees(region):
    check(2, region, 64, jnp.bfloat16, 2e-2, {"context": 2})
