"""Samples split over context groups: the same loss and gradient as whole."""

import dataclasses

import jax
import pytest
from test_packed_step import (
    CLASSES,
    accumulate_of,
    assert_same,
    batches_of,
    mean_gradient,
    plan_with,
    spec_of,
    trained_weights,
    write_sizes,
)

from alload_jax.config import Config, DataConfig, RunConfig, with_context
from alload_jax.errors import InputError
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sharding.mesh import (
    MeshConfig,
    batch_sharding,
    local_plan_ranks,
    make_mesh,
    ranks_of,
)
from alload_jax.training.step import zero_accumulator

MODEL = dataclasses.replace(CLASSES, num_heads=4)
SIZES = {(1, 2, 2): 18, (3, 4, 4): 9, (5, 6, 6): 3}
"""(frames, height, width) of latents and how many: 1, 12 and 45 tokens."""

needs_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_sizes(tmp_path_factory.mktemp("long") / "data", SIZES, lambda n: n % 2 + 1)


@pytest.fixture(scope="module")
def expected(manifest):
    """Of every sample by itself, on one device."""
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    return mean_gradient(MODEL, one, batches_of(manifest, MODEL, "fixed"))


@pytest.mark.slow
@needs_devices
@pytest.mark.parametrize(
    ("axes", "m_mem"),
    [
        ({"context": 4, "fsdp": 2}, 40),
        pytest.param({"context": 2, "fsdp": 2, "tensor": 2}, 64, marks=pytest.mark.slow),
    ],
)
def test_split_samples_give_the_loss_and_gradient_of_whole_ones(axes, m_mem, manifest, expected):
    mesh = make_mesh(MeshConfig(**axes))
    options = {"context": axes["context"], "m_mem": m_mem}
    batches = batches_of(manifest, MODEL, "balanced", ranks_of(mesh), **options)
    assert {odd for b in batches for odd in b.metadata.split.split.length.ravel().tolist()} >= {45}
    key, weights = trained_weights(MODEL, mesh)
    sums = zero_accumulator(spec_of(MODEL), mesh, weights, batches[0])
    placed = jax.device_put(batches, batch_sharding(mesh))
    traced = accumulate_of(MODEL, mesh).lower(weights, sums, placed[0], key)
    program = traced.compile()
    for batch in placed:
        sums = program(weights, sums, batch, key)
    assert float(sums.weight) == pytest.approx(len(manifest), rel=1e-6)
    found = sums.loss / sums.weight, jax.tree.map(lambda g: g / sums.weight, sums.grads)
    assert_same(found, expected)
    lines = program.as_text().splitlines()
    assert any("all-to-all(" in line for line in lines)
    gathered = [line.split("all-gather(")[0] for line in lines if "all-gather(" in line]
    assert not any(f",{m_mem}," in shape or f"[{m_mem}," in shape for shape in gathered)


def test_each_split_size_needs_one_program(manifest):
    plan, collation = plan_with(manifest, MODEL, "balanced", 8, context=2, m_mem=32)
    splits = [batch.metadata.split for batch in collation.shapes(plan)]
    regions = {split.split_tokens if split else 0 for split in splits}
    assert regions == set(plan.epoch(0).packing.split_sizes)
    assert 1 < len(regions) <= 5


def config_with(model=MODEL, planning=None, **axes):
    planning = {"m_mem": 32, "policy": "balanced"} | (planning or {})
    return Config(
        RunConfig("run"),
        DataConfig("data"),
        PlanningConfig(**planning),
        model,
        mesh=MeshConfig(**axes),
    )


def test_unsupported_splits_are_refused_in_one_line():
    with pytest.raises(InputError, match=r"mesh\.context·mesh\.tensor is 3, which does not divide"):
        config_with(context=3)
    with pytest.raises(InputError, match=r"mesh\.context·mesh\.tensor is 8, .*num_heads 4"):
        config_with(context=4, tensor=2)
    with pytest.raises(InputError, match=r"planning\.context is 2, but mesh\.context is 4"):
        config_with(planning={"context": 2}, context=4)


def test_the_mesh_decides_over_how_many_ranks_samples_are_split():
    assert with_context(config_with(context=2)).planning.context == 2
    bucketed = config_with(planning={"policy": "dual_constraint"}, context=2)
    assert with_context(bucketed).planning.context == 1


@needs_devices
def test_fewer_devices_cannot_stand_for_context_groups():
    mesh = make_mesh(MeshConfig(context=2), jax.devices()[:4])
    assert local_plan_ranks(mesh, 4, context=2) == frozenset(range(4))
    assert local_plan_ranks(mesh, 8) == frozenset(range(8))  # of a plan that splits nothing
    with pytest.raises(InputError, match=r"planning\.ranks is 8, but with .* mesh\.context 2"):
        local_plan_ranks(mesh, 8, context=2)
