"""A model with joint attention, packed, bucketed, or one by one: the same loss and gradient."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx

from alload_jax.data.batch import signature
from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import conditions_for, samples_for
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.families import abstract_model
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.objectives.flow_matching import FlowMatching
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import TrainingSpec, Weights
from alload_jax.training.step import make_accumulate, zero_accumulator

CLASSES = HunyuanVideoConfig(
    dim=16,
    ffn_dim=24,
    num_heads=2,
    num_layers=2,
    in_channels=2,
    patch_size=(1, 2, 2),
    dtype="float32",
)
TEXT = dataclasses.replace(
    CLASSES,
    in_channels=5,
    out_channels=2,
    text=TextConfig(6, 9),
    glyphs=TextConfig(5, 7),
    glyph_hidden=12,
    image=ImageConfig(4),
)
MODELS = {"classes": CLASSES, "text": TEXT, "image": TEXT}
OBJECTIVE = FlowMatching(condition_dropout=0.3)
OPTIMIZER = OptimizerConfig(warmup_steps=0)
SIZES = [(1, 4, 4), (3, 4, 6)]
COUNT = 11


CASES = [pytest.param(name, marks=() if name == "image" else pytest.mark.slow) for name in MODELS]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A model and data for it: texts of different lengths, images and given frames or not."""
    name, model = request.param, MODELS[request.param]
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    folder = tmp_path_factory.mktemp("joint") / "data"
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for n in range(COUNT):
            size, extra = SIZES[rng.integers(len(SIZES))], {}
            condition = rng.integers(0, 10, n % 2 + 1).astype(np.int32)
            if model.text:
                condition = normal(rng.integers(0, 8), 6)
                extra["parts"] = {"glyphs": normal(rng.integers(0, 4), 5)}
            if name == "image":
                extra |= {"image": normal(3, 4), "given": normal(*size, 3)}
            writer.add(normal(*size, 2), condition, size, **extra)
    return model, read_manifest(folder)


def plan_of(case, policy, ranks=1, **options):
    model, manifest = case
    config = PlanningConfig(policy=policy, **{"m_mem": 108} | options)
    conditions = conditions_for(model, manifest)
    samples = samples_for(model, manifest, conditions, config.traits.packed)
    plan = make_plan(config, samples, ranks, seed=1)
    return plan, collation_for(plan, manifest, model, conditions)


def batches_of(case, policy, ranks=1, **options):
    """Every micro-batch of the first epoch."""
    plan, collation = plan_of(case, policy, ranks, **options)
    collate = Collator(StoreReader(case[1]), frozenset(range(ranks)), collation)
    steps = (collate(plan.step(number)) for number in range(plan.steps_per_epoch))
    return [batch for step in steps for batch in step.batches]


@cache
def weights_of(model):
    """Gates and head of a new model are zero; those of a trained one are not."""
    shapes = abstract_model(model).params
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    values = [np.asarray(rng.normal(0, 0.3, leaf.shape), np.float32) for leaf in leaves]
    return jax.tree.unflatten(tree, values)


@cache
def accumulate_of(model, mesh):
    spec = TrainingSpec(model, OBJECTIVE, make_optimizer(OPTIMIZER, 100), OPTIMIZER.ema_decay)
    return spec, make_accumulate(spec, mesh)


def mean_gradient(model, batches, devices=1):
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    spec, accumulate = accumulate_of(model, mesh)
    weights = Weights(weights_of(model), {}, {})
    key = jax.random.key_data(jax.random.key(0))
    sums = zero_accumulator(spec, mesh, weights, batches[0])
    for batch in batches:
        sums = accumulate(weights, sums, jax.device_put(batch, batch_sharding(mesh)), key)
    return sums.loss / sums.weight, jax.tree.map(lambda g: g / sums.weight, sums.grads)


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    leaves = [jax.tree.leaves(each[1]) for each in (found, expected)]
    # Biases of the refiner's keys have no gradient but rounding.
    least = 1e-3 * max(np.linalg.norm(leaf) for leaf in leaves[1])
    for ours, theirs in zip(*leaves, strict=True):
        size = max(np.linalg.norm(np.asarray(theirs, np.float64)), least)
        assert np.linalg.norm(np.asarray(ours, np.float64) - theirs) <= 1e-5 * size


LAYOUTS = [
    ("balanced", 1, {}),
    pytest.param(("first_fit", 1, {"align": 4}), marks=pytest.mark.slow),
    pytest.param(("balanced", 2, {}), marks=pytest.mark.slow),
    ("dual_constraint", 1, {}),
    ("equal_tokens", 2, {"max_programs": 1}),
]


@pytest.fixture(scope="module")
def one_by_one(case):
    return mean_gradient(case[0], batches_of(case, "fixed", rows=1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_gradient_of_the_samples_one_by_one(layout, case, one_by_one):
    policy, ranks, options = layout
    if len(jax.devices()) < ranks:
        pytest.skip("needs more devices")
    batches = batches_of(case, policy, ranks, **options)
    assert sum(int((batch.weight > 0).sum()) for batch in batches) == COUNT
    assert_same(mean_gradient(case[0], batches, ranks), one_by_one)


def test_one_program_serves_all_packed_rows(case):
    assert len({signature(batch) for batch in batches_of(case, "balanced")}) == 1
    plan, collation = plan_of(case, "balanced")
    (shapes,) = collation.shapes(plan)
    assert signature(shapes) == signature(batches_of(case, "balanced")[0])


def packed_outputs(model, batch):
    """The velocity of every sample, by its number."""
    graph, params = abstract_model(model).graph, weights_of(model)
    timestep = np.where(batch.weight > 0, 100.0 + batch.sample, 0.0).astype(np.float32)
    tokens = batch.tokens
    if batch.given is not None:
        tokens = np.concatenate(
            [x.reshape(*x.shape[:2], 4, -1) for x in (tokens, batch.given)], axis=-1
        ).reshape(*tokens.shape[:2], -1)

    @jax.jit
    def run(tokens, timestep, condition, metadata, position):
        module = nnx.merge(graph, params)
        return module.forward_packed(tokens, position, metadata, timestep, condition).velocity

    found = run(tokens, timestep, batch.condition, batch.metadata, batch.position)
    offset, length, _ = batch.metadata.tokens
    return {
        int(batch.sample[place]): np.asarray(
            found[place[0], offset[place] : offset[place] + length[place]]
        )
        for place in zip(*np.nonzero(batch.weight), strict=True)
    }


def test_other_neighbours_and_what_is_not_finite_reach_no_other_sample(case):
    model = case[0]
    batch = max(batches_of(case, "balanced"), key=lambda batch: int((batch.weight > 0).sum()))
    before = packed_outputs(model, batch)
    assert len(before) > 1
    row, slot = next(zip(*np.nonzero(batch.weight), strict=True))
    spoilt = int(batch.sample[row, slot])
    for value in (7.0, np.nan):
        changed = jax.tree.map(np.copy, batch)
        changed.tokens[row, batch.metadata.tokens.ids[row] == slot] = value
        if model.text:
            for tokens in changed.condition.values():
                tokens.values[row, tokens.segments.ids[row] == slot] = value
        after = packed_outputs(model, changed)
        for sample, expected in before.items():
            if sample == spoilt:
                assert np.isnan(after[sample]).all() if np.isnan(value) else True
                assert not np.array_equal(after[sample], expected)
            else:
                np.testing.assert_array_equal(after[sample], expected)


def test_plans_count_both_kinds_of_tokens(case):
    model, manifest = case
    conditions = conditions_for(model, manifest)
    video = manifest.samples(model.patch_size).seq_len
    packed, bucketed = (samples_for(model, manifest, conditions, kind) for kind in (True, False))
    most = conditions.length
    np.testing.assert_array_equal(bucketed.seq_len, video + most)
    expected = np.full(COUNT, most)
    if model.text:
        parts = manifest.part_lengths[:, 0] + manifest.text_length
        expected = parts + (manifest.form.image_shape or [0])[0]
    np.testing.assert_array_equal(packed.seq_len, video + expected)
    for batch in batches_of(case, "balanced"):
        tokens = (batch.metadata.tokens.length * (batch.weight > 0)).sum(axis=1)
        held = batch.condition if model.text else {}
        for part in held.values():
            tokens = tokens + part.segments.length.sum(axis=1)
        assert (tokens <= batch.tokens.shape[1]).all()


def test_rows_over_devices_gather_no_activations(case):
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    model = case[0]
    graph, params = abstract_model(model).graph, weights_of(model)
    sharding = batch_sharding(make_mesh(MeshConfig(), devices[:2]))
    batch = jax.device_put(batches_of(case, "balanced", 2)[0], sharding)
    objective = FlowMatching()

    @jax.jit
    def loss(batch):
        module = nnx.merge(graph, params)
        return objective(module, batch, jax.random.key(0), sharding).loss

    program = loss.lower(batch).compile().as_text()
    assert "all-gather" not in program
    assert "all-to-all" not in program
