"""The transformer under recomputation and on packed rows; test_conversion.py has its values."""

import dataclasses
import functools
import math
from collections import Counter
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.cudnn import cudnn_rows
from alload_jax.models.common.layers import rematerialise
from alload_jax.models.common.parts import patchify, unpatchify
from alload_jax.models.common.segments import PackedMetadata, segments_of
from alload_jax.models.common.sublayers import grid_positions
from alload_jax.models.families import abstract_model, family_of
from alload_jax.models.wan.transformer import WanConfig, WanTransformer
from alload_jax.planning.remat import RematPolicy

CONFIG = WanConfig(
    dim=24, ffn_dim=40, num_heads=2, num_layers=2, in_channels=2, freq_dim=16, dtype="float32"
)
TEXT = dataclasses.replace(CONFIG, text=TextConfig(dim=6, length=3))


@functools.cache
def randomised(config, seed=0):
    """The model with every parameter random: fresh ones leave out gates and the head."""
    graph, shapes = abstract_model(config)[:2]
    rng = np.random.default_rng(seed)
    return graph, jax.tree.map(
        lambda leaf: (rng.normal(0, 0.3, leaf.shape) + (leaf.ndim < 3) * 0.1).astype(np.float32),
        shapes,
    )


def inputs(config, batch, size, seed=1):
    rng = np.random.default_rng(seed)
    latents = jnp.asarray(rng.normal(size=(batch, *size, config.in_channels)), jnp.float32)
    timestep = jnp.asarray(rng.uniform(0, 1000, batch), jnp.float32)
    labels = jnp.asarray(rng.integers(0, config.num_classes + 1, (batch, 2)), jnp.int32)
    return latents, timestep, labels


def squares(config, size, seed=1):
    """A loss as a function of the parameters, and those."""
    graph, params = randomised(config)
    arguments = inputs(config, 2, size, seed)
    return lambda params: jnp.sum(nnx.merge(graph, params)(*arguments) ** 2), params


# ---------------------------------------------------------------- recomputation


@functools.cache
def gradient(remat, scan=True):
    config = dataclasses.replace(CONFIG, remat_layers=remat, scan_layers=scan)
    loss, params = squares(config, (2, 4, 4))
    return jax.jit(jax.grad(loss))(params)


QUICK = [
    (("full", "matmuls_and_attention"), True),
    (("offload_feed_forward_and_attention",), True),
    (("norms_matmuls_and_attention", "full"), False),
]
OTHERS = [((each,), True) for each in get_args(RematPolicy) if each != "none"]


@pytest.mark.parametrize(
    ("remat", "scan"),
    [
        *QUICK,
        *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS if each not in QUICK),
    ],
)
def test_rematerialisation_changes_no_gradient(remat, scan):
    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(a).max())

    jax.tree.map(same, gradient(("none",)), gradient(remat, scan))


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["full", "attention", "feed_forward_and_attention"])
def test_offloading_changes_no_bit_of_a_gradient_on_a_gpu(kept):
    offloaded = "offload" if kept == "full" else f"offload_{kept}"
    jax.tree.map(np.testing.assert_array_equal, gradient((kept,)), gradient((offloaded,)))


LADDER = [
    ("full",),
    ("attention",),
    ("attention", "feed_forward_and_attention"),
    ("feed_forward_and_attention",),
    ("feed_forward_and_attention", "matmuls_and_attention"),
    ("matmuls_and_attention",),
    ("norms_matmuls_and_attention",),
    ("none",),
]


@pytest.mark.parametrize(("scan", "ladder"), [(True, LADDER), (False, LADDER[::3])])
def test_rematerialisation_keeps_less_the_more_it_recomputes(scan, ladder):
    def kept(remat):
        config = dataclasses.replace(CONFIG, remat_layers=remat, scan_layers=scan)
        loss, params = squares(config, (4, 8, 8))
        _, backward = jax.eval_shape(lambda p: jax.vjp(loss, p), params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))

    found = [kept(remat) for remat in ladder]
    assert found == sorted(set(found))


def test_unrolled_layers_are_in_no_loop():
    def loops(scan):
        loss, params = squares(dataclasses.replace(CONFIG, scan_layers=scan), (2, 4, 4))
        return jax.jit(loss).lower(params).as_text().count("stablehlo.while")

    assert (loops(True), loops(False)) == (1, 0)


def test_offloading_moves_what_blocks_keep_to_the_host():
    def moved(remat):
        loss, params = squares(dataclasses.replace(CONFIG, remat=remat), (4, 8, 8))
        lowered = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",))
        text = lowered.as_text().splitlines()
        to_host = [line for line in text if 'xla_buffer_placement = "pinned' in line]
        return Counter(line.rpartition("-> ")[2].partition(" ")[0] for line in to_host)

    rows, tokens, heads = 2, 4 * 4 * 4, CONFIG.num_heads
    stream = f"tensor<{rows}x{tokens}x{CONFIG.dim}xf32>"
    of_attention = f"tensor<{rows}x{tokens}x{heads}x{CONFIG.dim // heads}xf32>"
    assert not moved("attention")
    assert moved("offload") == {stream: 1}
    assert moved("offload_attention") == {stream: 1, of_attention: 2}
    assert moved("offload_feed_forward_and_attention") == {stream: 2, of_attention: 2}


@pytest.mark.parametrize("keys", [512, 8191, 8192])
def test_fused_attention_goes_to_the_host_where_its_keys_are_many(keys):
    parts = [jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (256, keys, keys)]

    def kept(policy):
        run = rematerialise(lambda *p: cudnn_rows(*p) * 1, policy, in_loop=False)
        saved = jax.eval_shape(lambda *p: jax.vjp(run, *p)[1], *parts)
        return sum(leaf.shape == parts[0].shape for leaf in jax.tree.leaves(saved)) - 1

    found = [kept(policy) for policy in ("attention", "offload_attention", "full")]
    assert found == [1, keys >= 8192, 0]


# ---------------------------------------------------------------- arithmetic and settings


def test_a_fresh_model_predicts_zero():
    model = WanTransformer(dataclasses.replace(CONFIG, num_layers=1), rngs=nnx.Rngs(0))
    assert not np.asarray(model(*inputs(CONFIG, 2, (1, 4, 4)))).any()


def test_bfloat16_computes_in_bfloat16():
    graph, params = randomised(dataclasses.replace(CONFIG, dtype="bfloat16"))
    arguments = inputs(CONFIG, 2, (2, 4, 4))
    low, high = (
        jax.jit(lambda p, graph=graph: nnx.merge(graph, p)(*arguments))
        for graph in (graph, randomised(CONFIG)[0])
    )
    assert "bf16[2,8,40]" in str(low.trace(params).jaxpr)
    error = np.linalg.norm(low(params) - high(params)) / np.linalg.norm(high(params))
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 30, "num_heads": 4}, "dim / num_heads"),
        ({"dim": 12, "num_heads": 4}, "dim / num_heads"),
        ({"num_layers": 0}, "model.num_layers is 0"),
        ({"patch_size": (1, 0, 2)}, "model.patch_size"),
        ({"freq_dim": 3}, "model.freq_dim is 3"),
        ({"freq_dim": 0}, "model.freq_dim is 0"),
        ({"image": ImageConfig(4)}, "model.image is set without model.text"),
        (
            {"num_layers": 4, "remat_layers": ("full", "full", "none")},
            "remat_layers has 3 policies",
        ),
        ({"remat": "full", "remat_layers": ("full",)}, "give one"),
        ({"memory_budget": 0.0}, "model.memory_budget is 0.0 GB"),
        ({"norm": "torch"}, "model.norm is 'torch'"),
    ],
)
def test_impossible_shapes_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        WanConfig(**change)


# ---------------------------------------------------------------- packed rows

TOKENS, SLOTS, LIMITS = 40, 5, (5, 4, 4)
SHAPES = [[(3, 4, 4), (1, 2, 6)], [(3, 4, 4)]]
"""Latent (frames, height, width) of the samples of two rows."""


def draw(config, seed=1):
    """(latents, timestep, condition) of every sample, row by row."""
    rng = np.random.default_rng(seed)

    def sample(shape):
        latents = rng.normal(size=(*shape, config.in_channels))
        if config.text:
            condition = rng.normal(size=(config.text.length, config.text.dim))
        else:
            condition = rng.integers(0, config.num_classes, 2).astype(np.int32)
        return latents.astype(np.float32), np.float32(rng.uniform(0, 1000)), condition

    return [[sample(shape) for shape in row] for row in SHAPES]


def pack(config, rows, gap=1):
    """The arguments of `DiT.packed` for these samples, with a gap between them."""
    patch = math.prod(config.patch_size) * config.in_channels
    tokens = np.zeros((len(rows), TOKENS, patch), np.float32)
    positions = np.zeros((len(rows), TOKENS, 3), np.int32)
    table = np.zeros((2, len(rows), SLOTS), np.int32)
    of_condition = np.zeros((2, len(rows), SLOTS), np.int32)
    timestep = np.zeros((len(rows), SLOTS), np.float32)
    (length, *width), dtype = rows[0][0][2].shape, rows[0][0][2].dtype
    condition = np.zeros((len(rows), SLOTS * length, *width), dtype)
    for row, samples in enumerate(rows):
        at = 0
        for slot, (latents, time, text) in enumerate(samples):
            patches = np.asarray(patchify(latents[None], config.patch_size))[0]
            here = slice(at, at + len(patches))
            tokens[row, here] = patches
            grid = [n // p for n, p in zip(latents.shape, config.patch_size, strict=False)]
            positions[row, here] = np.asarray(grid_positions(*grid))
            table[:, row, slot] = at, len(patches)
            timestep[row, slot] = time
            first = slot * length
            condition[row, first : first + length] = text
            of_condition[:, row, slot] = first, length
            at += len(patches) + gap
    segments = segments_of(table, TOKENS)
    of_condition = segments_of(of_condition, condition.shape[1])
    return tokens, positions, (segments, of_condition), timestep, condition


def run_packed(graph, state, arguments, sharding=None):
    tokens, positions, segments, timestep, condition = arguments
    model = nnx.merge(graph, state)
    slots = segments[0].length.shape[1]
    lengths = ((0, slots), (TOKENS, 0))
    rows = PackedMetadata(*segments, None, LIMITS, lengths, condition.shape[1])
    found = model.forward_packed(tokens, positions, rows, timestep, condition, sharding=sharding)
    return found.velocity


def outputs_of(config, rows, packed, segments):
    """Each sample's part of a packed output, as latents."""
    found = []
    for row, samples in enumerate(rows):
        for slot, (latents, _, _) in enumerate(samples):
            at, length = (int(part[row, slot]) for part in segments[0][:2])
            shape = (1, *latents.shape)
            found.append(unpatchify(packed[row, at : at + length][None], shape, config.patch_size))
    return found


def alone(graph, state, sample):
    latents, time, condition = sample
    model = nnx.merge(graph, state)
    return model(latents[None], jnp.asarray(time)[None], condition[None])


@pytest.mark.parametrize(
    "config", [TEXT, dataclasses.replace(CONFIG, cross_norm=False)], ids=["text", "no cross norm"]
)
def test_packed_outputs_and_gradients_are_those_of_each_sample_by_itself(config):
    (graph, state), rows = randomised(config), draw(config)
    arguments, weights = pack(config, rows), (1.0, 0.5, 2.0)
    samples = [sample for row in rows for sample in row]

    def loss_of(parts, weights):
        pairs = zip(weights, parts, strict=True)
        return sum(w * jnp.mean(jnp.square(part - 1)) for w, part in pairs), parts

    def packed(state):
        whole = run_packed(graph, state, arguments)
        return loss_of(outputs_of(config, rows, whole, arguments[2]), weights)

    def single(state, sample, weight):
        return loss_of([alone(graph, state, sample)], [weight])

    if config != TEXT:  # values are enough
        of_rows, of_samples = (
            jax.jit(packed)(state),
            map(jax.jit(single), [state] * 3, samples, weights),
        )
        for found, (_, (other,)) in zip(of_rows[1], of_samples, strict=True):
            np.testing.assert_allclose(found, other, rtol=2e-4, atol=2e-5)
        return
    (loss, parts), grads = jax.jit(jax.value_and_grad(packed, has_aux=True))(state)
    graded = jax.jit(jax.value_and_grad(single, has_aux=True))
    each = [graded(state, *pair) for pair in zip(samples, weights, strict=True)]
    for found, ((_, (other,)), _) in zip(parts, each, strict=True):
        np.testing.assert_allclose(found, other, rtol=2e-4, atol=2e-5)
    assert float(loss) == pytest.approx(sum(float(value) for (value, _), _ in each), rel=1e-5)
    theirs = jax.tree.map(lambda *parts: sum(parts), *(grad for _, grad in each))
    for ours, other in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
        size = np.linalg.norm(np.asarray(other, np.float64))
        assert np.linalg.norm(np.asarray(ours, np.float64) - other) <= 1e-5 * size + 1e-9


def test_neither_a_nan_nor_other_neighbours_change_a_bit_of_other_samples():
    (graph, state), others = randomised(CONFIG), draw(CONFIG, seed=9)
    run = jax.jit(lambda arguments: run_packed(graph, state, arguments))

    def outputs(change):
        rows = draw(CONFIG)
        change(rows)
        arguments = pack(CONFIG, rows)
        return [np.asarray(x) for x in outputs_of(CONFIG, rows, run(arguments), arguments[2])]

    def spoil(rows):
        rows[0][1][0][0, 0, 0] = np.nan

    def replace(rows):
        rows[0][0] = others[0][0]

    clean, spoilt, changed = map(outputs, (lambda _: None, spoil, replace))
    assert np.isnan(spoilt[1]).all()
    for place in (0, 2):
        np.testing.assert_array_equal(spoilt[place], clean[place])
    for place in (1, 2):
        np.testing.assert_array_equal(changed[place], clean[place])
    assert (changed[0] != clean[0]).any()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_rows_over_devices_gather_no_activations():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    (graph, state), arguments = randomised(CONFIG), pack(CONFIG, draw(CONFIG))
    expected = jax.jit(lambda: run_packed(graph, state, arguments))()
    placed = jax.device_put(arguments, sharding)
    run = jax.jit(lambda a: run_packed(graph, state, a, sharding)).lower(placed).compile()
    assert "all-gather" not in run.as_text()
    np.testing.assert_allclose(run(placed), expected, rtol=2e-4, atol=2e-5)


class FakeGpu:
    device_kind = "a GPU"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("changes", "capability", "reason"),
    [
        ({}, "9.0", ""),
        ({}, "8.0", "compute capability 9.0, and this GPU has 8.0"),
        ({}, "gfx942", "needs an NVIDIA GPU"),
        ({"attention": "xla"}, "9.0", "model.attention is xla"),
        ({"dtype": "float32"}, "9.0", "dtype is float32"),
    ],
)
def test_what_keeps_a_model_from_packed_rows_is_named(changes, capability, reason, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [FakeGpu(capability)])
    config = dataclasses.replace(CONFIG, **{"dim": 32, "dtype": "bfloat16"} | changes)
    found = family_of(config).packing_unsupported_reason(config)
    assert reason in found if reason else found == ""


def test_frozen_bfloat16_parameters_compute_in_float32():
    """As `parameters.frozen_dtype` leaves them: only their rounding is lost."""
    (graph, state), arguments = randomised(TEXT), pack(TEXT, draw(TEXT))
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
    run = jax.jit(lambda state: run_packed(graph, state, arguments))
    np.testing.assert_allclose(run(low), run(rounded), rtol=1e-4, atol=1e-4)
