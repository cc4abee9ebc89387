"""Parts of blocks: patches, rotary embedding, projections, norms, feed-forward, class labels."""

import ast
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import normal
from lowering import lowered_for_cuda

from alload_jax.models.common import sublayers
from alload_jax.models.common.config import TransformerConfig
from alload_jax.models.common.embedding import ClassEmbedding
from alload_jax.models.common.layers import rematerialise
from alload_jax.models.common.parts import Linear, fan_out, patchify, unpatchify
from alload_jax.models.common.sublayers import (
    FeedForward,
    apply_rotary,
    grid_positions,
    rotary_table,
)
from alload_jax.models.families import abstract_model, config_from_fields
from alload_jax.planning.analytic import keeps_feed_forward
from alload_jax.sharding.mesh import AXES, BATCH_AXES
from pallas_kernels import devices


def test_tokens_are_patches_in_the_order_of_their_positions():
    grid, patch = (2, 3, 2), (1, 2, 3)
    shape = (2, *(g * p for g, p in zip(grid, patch, strict=True)), 2)
    latents = np.arange(np.prod(shape)).reshape(shape)
    tokens, positions = patchify(latents, patch), np.asarray(grid_positions(*grid))
    assert positions.tolist() == [list(place) for place in np.ndindex(grid)]
    for number, place in enumerate(positions):
        inside = (slice(p * n, p * (n + 1)) for n, p in zip(place, patch, strict=True))
        expected = latents[:, *inside].reshape(2, -1)
        np.testing.assert_array_equal(tokens[:, number], expected)
    np.testing.assert_array_equal(unpatchify(tokens, shape, patch), latents)


def test_rotary_embedding_is_complex_multiplication():
    for head_dim, options, sizes in (
        (2, {}, (2, 0, 0)),
        (24, {}, (8, 8, 8)),
        (128, {}, (44, 42, 42)),
        (12, {"theta": 256.0, "sizes": (4, 6, 2)}, (4, 6, 2)),
    ):
        positions, theta = np.asarray(grid_positions(3, 2, 5)), options.get("theta", 10_000.0)
        x = np.random.default_rng(0).normal(size=(2, 30, 3, head_dim)).astype(np.float32)
        angles = [
            positions[:, axis] * theta ** (-2 * i / size)
            for axis, size in enumerate(sizes)
            for i in range(size // 2)
        ]
        expected = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * np.stack(angles, -1))[:, None]
        table = rotary_table(positions, (3, 2, 5), head_dim, **options)
        turned = np.asarray(jax.jit(apply_rotary)(jnp.asarray(x), table))
        np.testing.assert_allclose(turned[..., 0::2], expected.real, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(turned[..., 1::2], expected.imag, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("place", [(4, 0, 0), (0, 2, 0), (0, 0, 7), (-1, 0, 0), (0, 0, -9)])
def test_positions_outside_the_limits_are_refused(place):
    positions, limits = np.asarray([(3, 1, 6), place]), (4, 2, 7)
    with pytest.raises(ValueError, match=r"rotary_table: position \[.*outside .* \[4, 2, 7\]"):
        rotary_table(positions, limits, 12)
    traced = jax.jit(lambda positions: rotary_table(positions, limits, 12))(positions)
    known = rotary_table(positions[:1], limits, 12)
    for part, expected in zip(traced, known, strict=True):
        np.testing.assert_array_equal(part[0], expected[0])
        assert np.isnan(part[1]).any()


def test_class_tokens_are_a_row_of_the_table_and_the_sinusoid_of_their_place():
    embedding = ClassEmbedding(10, 8, dtype=jnp.float32, rngs=nnx.Rngs(0))
    labels = np.array([[3, 10, 7], [7, 3, 0]])
    angle = np.arange(3)[:, None] * 100.0 ** (-np.arange(4) / 4)
    place = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    expected = np.asarray(embedding.table.embedding[...])[labels] + place
    np.testing.assert_allclose(embedding(jnp.asarray(labels)), expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_shared_input_adds_each_to_the_sum_of_those_behind_it():
    """As cuBLAS's epilogue needs it: a product, to which an array is added."""
    x = jnp.ones(3)
    parts, pull = jax.vjp(lambda x: fan_out(x, 3), x)
    assert all((part == x).all() for part in parts)
    np.testing.assert_array_equal(pull((x, 2 * x, 4 * x))[0], 7 * x)
    first, second = jax.make_jaxpr(pull)((x, 2 * x, 3 * x)).jaxpr.eqns
    assert (first.primitive.name, second.primitive.name) == ("add", "add")
    assert second.invars[1] is first.outvars[0]


FIELDS = {"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 1, "in_channels": 4}
FIELDS |= {"text": {"dim": 16, "length": 8}, "image": {"dim": 16}, "dtype": "float32"}
ROOT = Path(__file__).parents[3]
FAMILIES = {"wan": {}, "hunyuan_video": {"glyphs": {"dim": 16, "length": 8}}}


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_of_models_keep_their_digits_at_any_mean(family):
    config = config_from_fields({"family": family} | FIELDS | FAMILIES[family])
    graph, shapes = abstract_model(config)[:2]
    ones = jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.full(leaf.shape, "scale" in jax.tree_util.keystr(path), np.float32),
        shapes,
    )
    norms = (nnx.LayerNorm, nnx.RMSNorm)
    found = [module for _, module in nnx.iter_graph(nnx.merge(graph, ones))]
    found = [module for module in found if isinstance(module, norms)]
    assert {type(module) for module in found} == set(norms)
    for module in found:
        norm, state = nnx.split(module)
        size = jax.tree.leaves(state)[0].shape[-1]
        norm = nnx.merge(norm, jax.tree.map(lambda leaf, n=size: leaf.reshape(-1, n)[0], state))
        for mean in (0.0, 1.0, 10.0, 100.0, 1000.0):
            x = mean + np.random.default_rng(0).normal(size=(16, size)).astype(np.float32)
            exact = x.astype(np.float64)
            centre = 0 if isinstance(module, nnx.RMSNorm) else exact.mean(-1, keepdims=True)
            power = ((exact - centre) ** 2).mean(-1, keepdims=True) + module.epsilon
            # A row's mean is known to a unit of float32, four of its size.
            np.testing.assert_allclose(
                norm(jnp.asarray(x)), (exact - centre) / np.sqrt(power), 0, 2.0**-22 * (4 + mean)
            )


def fast_variances(path):
    """Lines of a file that build a norm which computes E[x²] − E[x]², as Flax does by default."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
        if name.endswith("Norm") and name != "RMSNorm" and name[0].isupper():
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            if given.get("use_fast_variance") != "False":
                yield f"{path}:{node.lineno}: {name} without use_fast_variance=False"


def test_no_norm_takes_its_variance_from_a_difference(tmp_path):
    found = [line for path in ROOT.glob("alload_jax/**/*.py") for line in fast_variances(path)]
    assert not found, found
    (tmp_path / "a.py").write_text("nnx.LayerNorm(4)\nnnx.GroupNorm(4, use_fast_variance=True)")
    assert len(list(fast_variances(tmp_path / "a.py"))) == 2


HEADS, DIM = 4, 32
CASES = {
    "rows with one table": ((3, 8), "shared", False),
    "one row, which is split": ((1, 16), "shared", False),
    "one row that does not divide": ((1, 7), "shared", False),
    "packed rows": ((2, 8), "own", False),
    "each head": ((3, 8), "shared", True),
    "no rotation": ((2, 5), None, False),
}


def made(name):
    (rows, tokens), table, per_head = CASES[name]
    linear = Linear(DIM, DIM, rngs=nnx.Rngs(0))
    norm = nnx.RMSNorm(DIM // HEADS if per_head else DIM, rngs=nnx.Rngs(1))
    rng = np.random.default_rng(2)
    norm.scale[...] = normal(rng, *norm.scale.shape) / 5 + 1
    linear.bias[...] = normal(rng, DIM)
    angle = normal(rng, *((rows, tokens, 4)[table == "shared" :]))
    rotary = (jnp.asarray(np.cos(angle)), jnp.asarray(np.sin(angle))) if table else None
    return jnp.asarray(normal(rng, rows, tokens, DIM)), linear, norm, rotary


def with_gradient(x, linear, norm, rotary, sharding=None):
    config = TransformerConfig(dim=DIM, num_heads=HEADS, dtype="float32")
    layer = sublayers.AttentionProjections(config, norm_width=None, eps=1e-6, rngs=nnx.Rngs(0))

    def total(x, linear, norm):
        heads = layer.projected(x, linear, norm, rotary, sharding)
        return jnp.sum(jnp.sin(heads)), heads

    gradient = nnx.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
    return nnx.jit(gradient)(x, linear, norm)


def close(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    for left, right in pairs:
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_heads_are_projected_normed_and_rotated_with_and_without_kernels(name, monkeypatch):
    x, linear, norm, rotary = made(name)
    shape, per_head = (*x.shape[:2], HEADS, DIM // HEADS), CASES[name][2]

    @nnx.jit
    def by_hand(x, linear, norm):
        y = linear(x)
        y = norm(y.reshape(shape)) if per_head else norm(y).reshape(shape)
        return y if rotary is None else apply_rotary(y, rotary)

    plain = with_gradient(x, linear, norm, rotary)
    close(plain[0][1], by_hand(x, linear, norm))
    interpreted = partial(sublayers.rms_norm_rotary, interpret=True)
    monkeypatch.setattr(sublayers, "rms_norm_rotary", interpreted)
    close(with_gradient(x, linear, norm, rotary), plain)


@pytest.mark.parametrize("tensor", [1, 2])
def test_kernels_compute_the_same_on_a_mesh(tensor, monkeypatch):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    per_head = tensor > 1  # statistics of the whole width are XLA's there
    x, linear, norm, rotary = made("each head" if per_head else "rows with one table")
    x = jnp.concatenate([x, x[:1]])
    expected = with_gradient(x, linear, norm, rotary)
    shape = (2, 2 // tensor, 1, tensor)
    mesh = jax.make_mesh(shape, AXES, (AxisType.Auto,) * 4, devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    called = []

    def interpreted(*arrays, **options):
        called.append(options["sharding"].spec)
        return run(*arrays, **options, interpret=True)

    run = sublayers.rms_norm_rotary
    monkeypatch.setattr(sublayers, "rms_norm_rotary", interpreted)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, sharding)
        close(with_gradient(placed, linear, norm, rotary, sharding), expected)
    assert called[0][2:] == (("tensor",) if tensor > 1 else ())


def gated(graph, policy):
    """A loss in which the layer's output has a gate, whose gradient needs the output."""

    def loss(state, x, gate):
        def block(x, state):
            layer = nnx.merge(graph, state)
            return x + gate * layer(x, output_kept=keeps_feed_forward(policy))

        out = rematerialise(block, policy, in_loop=False)(x, state)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return loss


@pytest.mark.parametrize(
    ("policy", "runs"),
    [("none", 1), ("full", 2), ("feed_forward_and_attention", 1), ("matmuls_and_attention", 1)],
)
def test_gelu_runs_once_more_only_where_the_layer_is_applied_again(policy, runs):
    config = TransformerConfig(dim=64, ffn_dim=1024, dtype="bfloat16")
    graph, state = nnx.split(FeedForward(config, rngs=nnx.Rngs(0)))
    shapes = (state, jnp.zeros((2, 2048, 64), jnp.bfloat16), jnp.zeros((), jnp.bfloat16))
    grad = jax.grad(gated(graph, policy), argnums=(0, 1, 2))
    with (
        mock.patch.object(devices, "unsupported_triton_device", return_value=None),
        mock.patch.object(devices, "device_kind", return_value="NVIDIA H200"),
    ):
        text = lowered_for_cuda(grad, *shapes)
    found = {name: text.count(f'name = "bias_gelu_{name}"') for name in ("forward", "backward")}
    assert found == {"forward": runs, "backward": 1}
