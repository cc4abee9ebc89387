"""The transformer against an independent float64 one, and its invariances."""

import dataclasses
from collections import Counter
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alload_jax.errors import InputError
from alload_jax.models.common.cudnn import cudnn_rows
from alload_jax.models.common.layers import rematerialise
from alload_jax.models.wan.transformer import WanConfig, WanTransformer
from alload_jax.planning.remat import RematPolicy

CONFIG = WanConfig(
    dim=24, ffn_dim=40, num_heads=2, num_layers=3, in_channels=2, freq_dim=16, dtype="float32"
)


def randomised(config, seed=0):
    """The model with every parameter random: fresh ones leave out gates and the head."""
    model = WanTransformer(config, rngs=nnx.Rngs(seed))
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    leaves = [
        jnp.asarray(rng.normal(0, 0.3, leaf.shape) + (leaf.ndim < 3) * 0.1, jnp.float32)
        for leaf in leaves
    ]
    return graph, jax.tree.unflatten(tree, leaves)


def inputs(config, batch, size, seed=1):
    rng = np.random.default_rng(seed)
    latents = jnp.asarray(rng.normal(size=(batch, *size, config.in_channels)), jnp.float32)
    timestep = jnp.asarray(rng.uniform(0, 1000, batch), jnp.float32)
    labels = jnp.asarray(rng.integers(0, config.num_classes + 1, (batch, 2)), jnp.int32)
    return latents, timestep, labels


class Oracle:
    """Wan 2.1's block written out in NumPy float64, one sample at a time."""

    def __init__(self, config, params):
        self.config = config
        self.params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def __call__(self, latents, timestep, labels):
        p, config = self.params, self.config
        frames, height, width, channels = latents.shape
        _, ph, pw = config.patch_size
        places = [
            (t, h, w)
            for t in range(frames)
            for h in range(height // ph)
            for w in range(width // pw)
        ]
        x = np.stack(
            [latents[t, h * ph : (h + 1) * ph, w * pw : (w + 1) * pw].ravel() for t, h, w in places]
        )
        x = self.linear(p["patch_embedding"], x)
        half = config.freq_dim // 2
        angle = timestep * 10_000.0 ** (-np.arange(half) / half)
        time = np.concatenate([np.cos(angle), np.sin(angle)])
        embedding = p["time_embedding"]
        time = self.linear(embedding["out"], self.silu(self.linear(embedding["hidden"], time)))
        modulation = self.linear(embedding["modulation"], self.silu(time)).reshape(6, -1)
        condition = p["condition_embedding"]["table"]["embedding"][labels]
        half = config.dim // 2
        angle = np.arange(len(labels))[:, None] * 100.0 ** (-np.arange(half) / half)
        condition = condition + np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
        for n in range(config.num_layers):
            layer = jax.tree.map(lambda leaf, n=n: leaf[n], p["blocks"])
            x = self.block(layer, x, modulation, condition, places)
        shift, scale = p["head"]["modulation"] + time
        out = self.linear(p["head"]["out"], self.norm(x) * (1 + scale) + shift)
        result = np.zeros(latents.shape)
        for token, (t, h, w) in zip(out, places, strict=True):
            result[t, h * ph : (h + 1) * ph, w * pw : (w + 1) * pw] = token.reshape(
                ph, pw, channels
            )
        return result

    def block(self, layer, x, modulation, condition, places):
        shift1, scale1, gate1, shift2, scale2, gate2 = layer["modulation"] + modulation
        y = self.norm(x) * (1 + scale1) + shift1
        x = x + self.attend(layer["self_attention"], y, y, places) * gate1
        y = x
        if affine := layer.get("cross_norm"):
            y = self.norm(x) * affine["scale"] + affine["bias"]
        x = x + self.attend(layer["cross_attention"], y, condition, None)
        y = self.norm(x) * (1 + scale2) + shift2
        hidden = self.linear(layer["feed_forward"]["hidden"], y)
        gelu = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        return x + self.linear(layer["feed_forward"]["out"], gelu) * gate2

    def attend(self, layer, x, context, places):
        query, key = self.linear(layer["query"], x), self.linear(layer["key"], context)
        if self.config.qk_norm:
            query, key = self.rms(layer["query_norm"], query), self.rms(layer["key_norm"], key)
        value = self.linear(layer["value"], context)
        size = self.config.dim // self.config.num_heads
        outputs = []
        for head in range(self.config.num_heads):
            part = slice(head * size, (head + 1) * size)
            q, k = query[:, part], key[:, part]
            if places is not None:
                q, k = self.rotate(q, places), self.rotate(k, places)
            logits = q @ k.T / np.sqrt(size)
            weights = np.exp(logits - logits.max(1, keepdims=True))
            outputs.append(weights / weights.sum(1, keepdims=True) @ value[:, part])
        return self.linear(layer["out"], np.concatenate(outputs, 1))

    def rotate(self, x, places):
        size = x.shape[1]
        spatial = 2 * (size // 6)
        angles = []
        for axis, share in enumerate((size - 2 * spatial, spatial, spatial)):
            for i in range(share // 2):
                angles.append([place[axis] * 10_000.0 ** (-2 * i / share) for place in places])
        turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * np.asarray(angles).T)
        result = np.empty_like(x)
        result[:, 0::2], result[:, 1::2] = turned.real, turned.imag
        return result

    def norm(self, x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.config.eps)

    def rms(self, layer, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.eps) * layer["scale"]

    @staticmethod
    def linear(layer, x):
        return x @ layer["kernel"] + layer["bias"]

    @staticmethod
    def silu(x):
        return x / (1 + np.exp(-x))


SIZES = [(CONFIG, size) for size in ((1, 2, 2), (1, 8, 6), (5, 4, 2), (3, 2, 10))]
WITHOUT = [{"qk_norm": False}, {"cross_norm": False}]


@pytest.mark.parametrize(
    ("config", "size"),
    SIZES + [(dataclasses.replace(CONFIG, **changes), (3, 4, 4)) for changes in WITHOUT],
)
def test_equals_the_float64_oracle_at_any_size(config, size):
    graph, params = randomised(config)
    latents, timestep, labels = inputs(config, 3, size)
    drawn = np.asarray(nnx.merge(graph, params)(latents, timestep, labels), np.float64)
    oracle = Oracle(config, params)
    for n in range(3):
        expected = oracle(
            np.asarray(latents[n], np.float64), float(timestep[n]), np.asarray(labels[n])
        )
        error = np.linalg.norm(drawn[n] - expected) / np.linalg.norm(expected)
        assert error < 2e-5


@pytest.mark.parametrize(
    "remat",
    [
        ["full", "matmuls_and_attention"],
        ["offload_feed_forward_and_attention"],
        ["offload", "none"],
        *(
            pytest.param([each], marks=pytest.mark.slow)
            for each in get_args(RematPolicy)
            if each not in ("none", "offload_feed_forward_and_attention")
        ),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("scan", [True, False], ids=["loop", "unrolled"])
def test_rematerialisation_changes_no_gradient(remat, scan):
    plain, kept = gradient(["none"]), gradient(remat, scan)

    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(a).max())

    jax.tree.map(same, plain, kept)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kept", "offloaded"),
    [
        ("full", "offload"),
        ("attention", "offload_attention"),
        ("feed_forward_and_attention", "offload_feed_forward_and_attention"),
    ],
)
def test_offloading_changes_no_bit_of_a_gradient_on_a_gpu(kept, offloaded):
    jax.tree.map(np.testing.assert_array_equal, gradient([kept]), gradient([offloaded]))


def gradient(remat, scan=True):
    config = dataclasses.replace(CONFIG, num_layers=2, remat_layers=tuple(remat), scan_layers=scan)
    graph, params = randomised(config)
    arguments = inputs(config, 2, (2, 4, 4))
    return jax.jit(jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(*arguments) ** 2)))(
        params
    )


def residual_bytes(remat, scan):
    config = dataclasses.replace(CONFIG, num_layers=2, remat_layers=tuple(remat), scan_layers=scan)
    graph, params = randomised(config)
    arguments = inputs(config, 2, (4, 8, 8))

    def total(params):
        return jnp.sum(nnx.merge(graph, params)(*arguments) ** 2)

    _, backward = jax.eval_shape(lambda p: jax.vjp(total, p), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


@pytest.mark.parametrize("scan", [True, False], ids=["loop", "unrolled"])
def test_rematerialisation_keeps_less_the_more_it_recomputes(scan):
    ladder = [
        ["full"],
        ["attention"],
        ["attention", "feed_forward_and_attention"],
        ["feed_forward_and_attention"],
        ["feed_forward_and_attention", "matmuls_and_attention"],
        ["matmuls_and_attention"],
        ["norms_matmuls_and_attention"],
        ["none"],
    ]
    kept = [residual_bytes(policies, scan) for policies in ladder]
    assert kept == sorted(kept)
    assert len(set(kept)) == len(ladder)


def test_policies_of_layers_divide_their_number():
    with pytest.raises(InputError, match=r"model\.remat_layers has 3 policies"):
        WanConfig(num_layers=4, remat_layers=("full", "full", "none"))


def test_unrolled_layers_are_in_no_loop():
    def loops(scan):
        config = WanConfig(**{**vars(CONFIG), "scan_layers": scan})
        graph, params = randomised(config)
        arguments = inputs(config, 2, (2, 4, 4))
        step = jax.jit(lambda params: nnx.merge(graph, params)(*arguments))
        return step.lower(params).as_text().count("stablehlo.while")

    assert (loops(True), loops(False)) == (1, 0)


def test_offloading_moves_what_blocks_keep_to_the_host():
    def moved(remat):
        config = WanConfig(**{**vars(CONFIG), "remat": remat})
        graph, params = randomised(config)
        arguments = inputs(config, 2, (4, 8, 8))

        def total(params):
            return jnp.sum(nnx.merge(graph, params)(*arguments) ** 2)

        lowered = jax.jit(jax.grad(total)).trace(params).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        to_host = [line for line in text.splitlines() if 'xla_buffer_placement = "pinned' in line]
        return Counter(line.rpartition("-> ")[2].partition(" ")[0] for line in to_host)

    assert not moved("full")
    assert not moved("attention")
    rows, tokens, heads = 2, 4 * 4 * 4, CONFIG.num_heads
    stream = f"tensor<{rows}x{tokens}x{CONFIG.dim}xf32>"
    of_attention = f"tensor<{rows}x{tokens}x{heads}x{CONFIG.dim // heads}xf32>"
    assert moved("offload") == {stream: 1}
    assert moved("offload_attention") == {stream: 1, of_attention: 2}
    assert moved("offload_feed_forward_and_attention") == {stream: 2, of_attention: 2}


@pytest.mark.parametrize("keys", [512, 8191, 8192, 32_760])
def test_fused_attention_goes_to_the_host_where_its_keys_are_many(keys):
    parts = [jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (256, keys, keys)]

    def kept(policy):
        run = rematerialise(lambda *p: cudnn_rows(*p) * 1, policy, in_loop=False)
        saved = jax.eval_shape(lambda *p: jax.vjp(run, *p)[1], *parts)
        return sum(leaf.shape == parts[0].shape for leaf in jax.tree.leaves(saved)) - 1

    assert kept("attention") == 1
    assert kept("offload_attention") == (keys >= 8192)
    assert kept("full") == 0


def test_a_fresh_model_predicts_zero():
    model = WanTransformer(CONFIG, rngs=nnx.Rngs(0))
    assert not np.asarray(model(*inputs(CONFIG, 2, (1, 4, 4)))).any()


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    config = WanConfig(**{**vars(CONFIG), "dtype": "bfloat16"})
    _, params = randomised(config)
    graph = nnx.split(nnx.eval_shape(lambda: WanTransformer(config, rngs=nnx.Rngs(0))))[0]
    arguments = inputs(CONFIG, 2, (2, 4, 4))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    program = str(jax.make_jaxpr(lambda p: nnx.merge(graph, p)(*arguments))(params))
    assert "bf16[2,8,40]" in program
    low = np.asarray(nnx.merge(graph, params)(*arguments))
    high = np.asarray(nnx.merge(*randomised(CONFIG))(*arguments))
    assert np.linalg.norm(low - high) < 0.05 * np.linalg.norm(high)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 30, "num_heads": 4}, "dim / num_heads"),
        ({"num_layers": 0}, "model.num_layers is 0"),
        ({"patch_size": (1, 0, 2)}, "model.patch_size"),
        ({"freq_dim": 3}, "model.freq_dim is 3"),
    ],
)
def test_impossible_shapes_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        WanConfig(**change)
