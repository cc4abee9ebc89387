"""The transformer on packed rows is the transformer on each sample by itself."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.models.common.config import TextConfig
from alload_jax.models.common.parts import patchify, unpatchify
from alload_jax.models.common.segments import PackedMetadata, segments_of
from alload_jax.models.common.sublayers import grid_positions
from alload_jax.models.families import family_of
from alload_jax.models.wan.transformer import WanConfig, WanTransformer

CONFIG = WanConfig(
    dim=24,
    ffn_dim=40,
    num_heads=2,
    num_layers=2,
    in_channels=2,
    patch_size=(1, 2, 2),
    num_classes=5,
    dtype="float32",
)
VARIANTS = {
    "text": WanConfig(**vars(CONFIG) | {"text": TextConfig(dim=6, length=3)}),
    "no cross norm": WanConfig(**vars(CONFIG) | {"cross_norm": False}),
}
TOKENS, SLOTS, LIMITS = 40, 5, (5, 4, 4)
SHAPES = [[(3, 4, 4), (1, 2, 6)], [(3, 4, 4)]]
"""Latent (frames, height, width) of the samples of two rows."""


def build(config, seed=0):
    """A model whose every parameter matters."""
    model = WanTransformer(config, rngs=nnx.Rngs(seed))
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(seed)
    noisy = [leaf + jnp.asarray(0.1 * rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
    return graph, jax.tree.unflatten(tree, noisy)


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


def losses(parts, weights):
    return sum(w * jnp.mean(jnp.square(part - 1)) for w, part in zip(weights, parts, strict=True))


SLOW = pytest.param("no cross norm", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [SLOW if name == "no cross norm" else name for name in VARIANTS])
def test_outputs_and_gradients_are_those_of_each_sample_by_itself(name):
    config = VARIANTS[name]
    (graph, state), rows = build(config), draw(config)
    arguments, weights = pack(config, rows), (1.0, 0.5, 2.0)
    samples = [sample for row in rows for sample in row]

    def packed(state):
        whole = run_packed(graph, state, arguments)
        parts = outputs_of(config, rows, whole, arguments[2])
        return losses(parts, weights), parts

    @jax.jit
    def single(state, sample, weight):
        def loss(state):
            part = alone(graph, state, sample)
            return losses([part], [weight]), part

        return jax.value_and_grad(loss, has_aux=True)(state)

    (loss, parts), grads = jax.jit(jax.value_and_grad(packed, has_aux=True))(state)
    each = [single(state, *pair) for pair in zip(samples, weights, strict=True)]
    for found, ((_, other), _) in zip(parts, each, strict=True):
        np.testing.assert_allclose(found, other, rtol=2e-4, atol=2e-5)
    assert float(loss) == pytest.approx(sum(float(value) for (value, _), _ in each), rel=1e-5)
    theirs = jax.tree.map(lambda *parts: sum(parts), *(grad for _, grad in each))
    for ours, other in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
        size = np.linalg.norm(np.asarray(other, np.float64))
        assert np.linalg.norm(np.asarray(ours, np.float64) - other) <= 1e-5 * size + 1e-9


def test_a_nan_in_one_sample_reaches_no_other():
    config = CONFIG
    (graph, state), rows = build(config), draw(config)
    run = jax.jit(lambda arguments: run_packed(graph, state, arguments))
    clean = outputs_of(config, rows, run(pack(config, rows)), pack(config, rows)[2])
    rows[0][1][0][0, 0, 0] = np.nan
    arguments = pack(config, rows)
    spoilt = outputs_of(config, rows, run(arguments), arguments[2])
    assert np.isnan(spoilt[1]).all()
    for place in (0, 2):
        assert (np.asarray(spoilt[place]) == np.asarray(clean[place])).all()


def test_other_neighbours_change_no_bit():
    config = CONFIG
    (graph, state), rows, others = build(config), draw(config), draw(config, seed=9)
    run = jax.jit(lambda arguments: run_packed(graph, state, arguments))
    arguments = pack(config, rows)
    found = outputs_of(config, rows, run(arguments), arguments[2])
    rows[0][0] = others[0][0]
    changed = outputs_of(config, rows, run(pack(config, rows)), arguments[2])
    assert (np.asarray(found[1]) == np.asarray(changed[1])).all()
    assert (np.asarray(found[0]) != np.asarray(changed[0])).any()


def test_rows_over_devices_gather_no_activations():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices[:2])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    config = CONFIG
    (graph, state), rows = build(config), draw(config)
    arguments = pack(config, rows)
    expected = jax.jit(lambda: run_packed(graph, state, arguments))()
    placed = jax.device_put(arguments, sharding)
    run = jax.jit(lambda a: run_packed(graph, state, a, sharding))
    assert "all-gather" not in run.lower(placed).compile().as_text()
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
    config = WanConfig(**vars(CONFIG) | {"dim": 32, "dtype": "bfloat16"} | changes)
    found = family_of(config).packing_unsupported_reason(config)
    assert reason in found if reason else found == ""


def test_frozen_bfloat16_parameters_compute_in_float32():
    """As `parameters.frozen_dtype` leaves them: only their rounding is lost."""
    config = VARIANTS["text"]
    (graph, state), arguments = build(config), pack(config, draw(config))
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
    run = jax.jit(lambda state: run_packed(graph, state, arguments))
    np.testing.assert_allclose(run(low), run(rounded), rtol=1e-4, atol=1e-4)
