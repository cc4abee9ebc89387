"""Groups of devices that run different shapes in the same step do what one device does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group_cases import (
    SIZES,
    SPEC,
    OneDevice,
    figures,
    plan_for,
    steps_on,
    trainer_on,
    write_data,
)
from layouts import mesh_of, needs_devices

from alload_jax.errors import InputError
from alload_jax.planning.factory import make_plan
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sharding import mesh as mesh_module
from alload_jax.sharding.mesh import group_meshes
from alload_jax.training.state import init_state
from alload_jax.training.step import make_accumulate, make_update, zero_accumulator

STEPS = 5  # of two in an epoch
COMPILATION = "/jax/core/compile/backend_compile_duration"
LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"

pytestmark = pytest.mark.skipif(
    len(jax.devices("cpu")) < 4 or jax.default_backend() != "cpu", reason="needs 4 CPU devices"
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("groups") / "data")


@pytest.fixture(scope="module")
def one_device():
    return OneDevice()


def with_loud_padding(step):
    for batch in step.batches:
        batch.latents[batch.weight == 0] = 1e3
    return step


def assert_close(ours, theirs):
    for our, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        our, their = np.asarray(our, np.float64), np.asarray(their, np.float64)
        assert np.linalg.norm(our - their) <= 1e-5 * np.linalg.norm(their)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "ranks_per_group"), [({}, 1), ({"fsdp": 2}, 2), ({"context": 2}, 2)], ids=str
)
def test_groups_train_as_one_device_that_takes_all_their_micro_batches(
    axes, ranks_per_group, manifest, one_device, monkeypatch
):
    mesh, events = mesh_of(4, **axes), []
    plan = plan_for(manifest, 4, ranks_per_group)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, fun_name="", **__: events.append((event, fun_name))
    )
    trainer = trainer_on(manifest, plan, mesh)
    # Each group's devices compile a shape by themselves, which is traced and lowered once for all.
    assert events.count((LOWERING, "jit(add)")) == len(SIZES)
    placed = steps_on(manifest, plan, mesh, STEPS, change=with_loud_padding)
    found = [figures(trainer.step(placed[0]))]  # scalars have tiny programs of their own
    events.clear()
    # The host works between steps only on the arrays: their shardings are known.
    monkeypatch.delattr("alload_jax.sharding.mesh.path_name")
    found += [figures(trainer.step(step)) for step in placed[1:]]
    monkeypatch.undo()
    assert COMPILATION not in {event for event, _ in events}

    state, expected = one_device.train(manifest, plan, STEPS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len({loss for loss, _ in found}) == STEPS
    assert_close(trainer.state.params, state.params)
    assert_close(trainer.state.ema, state.ema)
    assert int(trainer.state.step) == STEPS

    # A step holds different shapes, an epoch an uneven end, and some rows padding.
    assert plan.steps_per_epoch == 2
    assert [len(step.batches) for step in placed] == [4, 1, 4, 1, 4]
    mixed = [len({batch.latents.shape for batch in step.batches}) for step in placed]
    assert max(mixed) == len(SIZES)
    assert min(float(batch.weight.min()) for batch in placed[0].batches) == 0

    groups = {group for group, _ in trainer.programs}
    assert len(groups) == mesh.shape["data"]
    assert len(trainer.programs) == len(groups) * len(SIZES)
    for (group, _), program in trainer.programs.items():
        (shardings, _) = program.input_shardings
        devices = set(group.devices.flat)
        assert all(s.device_set == devices for s in jax.tree.leaves(shardings))
        assert (f"num_partitions={len(devices)}" in program.as_text()) == (len(devices) > 1)

    # The state is split over all devices, and groups share its buffers.
    kernel = trainer.state.opt_state[1][0].mu["blocks"]["feed_forward"]["hidden"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // mesh.size
    whole = trainer.state.params["blocks"]["feed_forward"]["hidden"]["kernel"]
    pointers = {s.device: s.data.unsafe_buffer_pointer() for s in whole.addressable_shards}
    for weights, _, _ in trainer._local.values():
        part = weights.params["blocks"]["feed_forward"]["hidden"]["kernel"]
        for shard in part.addressable_shards:
            assert shard.data.unsafe_buffer_pointer() == pointers[shard.device]


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "axes", "parts"),
    [(8, {"fsdp": 2, "context": 2, "tensor": 2}, 4), (4, {"fsdp": 2}, 2)],
)
def test_all_devices_of_one_group_train_as_one(devices, axes, parts, manifest, one_device):
    mesh = mesh_of(devices, **axes)
    plan = plan_for(manifest, 1, 4)
    trainer = trainer_on(manifest, plan, mesh)
    found = [figures(trainer.step(step)) for step in steps_on(manifest, plan, mesh, STEPS)]
    state, expected = one_device.train(manifest, plan, STEPS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len({loss for loss, _ in found}) == STEPS
    assert_close(trainer.state.params, state.params)
    # Optimizer state and EMA are split over replicas too.
    moments = trainer.state.opt_state[1][0].mu
    trees = (trainer.state.params, parts), (trainer.state.ema, devices), (moments, devices)
    for tree, number in trees:
        for block, layer in (("self_attention", "query"), ("feed_forward", "hidden")):
            kernel = tree["blocks"][block][layer]["kernel"]
            assert kernel.addressable_shards[0].data.size == kernel.size // number


def test_one_group_or_packed_rows_need_no_groups(manifest):
    mesh = mesh_of(4)
    assert group_meshes(mesh, plan_for(manifest, 1, 4)) == ()
    packed = PlanningConfig("balanced", "independent", m_mem=40)
    plan = make_plan(packed, manifest.samples((1, 2, 2)), 4, 0, ranks_per_group=2)
    assert "ranks_per_group" not in plan.identity()
    assert group_meshes(mesh, plan) == ()


def test_mismatches_are_refused_in_one_line(manifest, monkeypatch):
    with pytest.raises(InputError, match=r"ranks_per_group is 1, not a multiple of the 2 ranks"):
        group_meshes(mesh_of(4, fsdp=2), plan_for(manifest, 4))
    with pytest.raises(InputError, match=r"has 2 shape groups, which mesh.data = 4 does not"):
        group_meshes(mesh_of(4), plan_for(manifest, 2, 2))
    with monkeypatch.context() as patched:
        found = iter([[1, 1], [2, 3, 2, 3]])
        patched.setattr(mesh_module, "processes_of", lambda _: next(found))
        with pytest.raises(InputError, match=r"shape group 1 span processes \[2, 3\]"):
            group_meshes(mesh_of(4), plan_for(manifest, 4))
    with pytest.raises(InputError, match=r"ranks_per_group is 3, which does not divide"):
        RankTopology(4, "independent", ranks_per_group=3)


# ---------------------------------------------------------------- sums of gradients


HALF = SPEC._replace(accumulate_dtype="bfloat16")
ROUNDING = 2.0**-8  # of bfloat16, relative to the value


def sums_of(spec, mesh, state, batches):
    accumulate = make_accumulate(spec, mesh)
    sums, after = zero_accumulator(spec, mesh, state.weights, batches[0]), []
    for batch in batches:
        sums = accumulate(state.weights, sums, batch, state.key)
        after.append(jax.tree.map(lambda g: np.asarray(g, np.float64), sums.grads))
    return sums, after


@pytest.mark.slow
def test_a_sum_in_bfloat16_is_rounded_once_for_each_micro_batch(manifest):
    mesh = mesh_of()
    state = init_state(SPEC, mesh, seed=0)
    steps = steps_on(manifest, plan_for(manifest, 1), mesh, 4)
    batches = [step.batches[0] for step in steps]
    batches = [each for each in batches if each.latents.shape == batches[0].latents.shape]
    assert len(batches) > 1
    half, rounded = sums_of(HALF, mesh, state, batches)
    full, exact = sums_of(SPEC, mesh, state, batches)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.grads)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(full.grads)} == {jnp.dtype("float32")}
    assert (half.loss, half.weight) == (full.loss, full.weight)
    for number, (ours, theirs) in enumerate(zip(rounded, exact, strict=True), 1):
        sizes = [jax.tree.map(np.abs, one) for one in exact[:number]]
        allowed = jax.tree.map(lambda *parts: 1.1 * ROUNDING * sum(parts), *sizes)
        jax.tree.map(
            lambda a, b, bound: np.testing.assert_array_less(np.abs(a - b), bound + 1e-12),
            ours,
            theirs,
            allowed,
        )
    update = make_update(HALF, mesh)
    after, zeroed, metrics = update(state, half)
    assert {leaf.dtype for leaf in jax.tree.leaves(zeroed.grads)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(exact[-1]))) / float(full.weight)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=0.01)
