from types import SimpleNamespace

import jax
import numpy as np
import pytest

from alload_jax.data.batch import Batch
from alload_jax.data.collate import HostStep
from alload_jax.data.loader import place_ahead
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh, ranks_of


@pytest.fixture(scope="module", params=[MeshConfig(), MeshConfig(fsdp=jax.device_count())])
def mesh(request):
    return make_mesh(request.param)


def host_batch(rng, rows):
    return Batch(
        latents=rng.normal(size=(rows, 1, 4, 4, 1)).astype(np.float32),
        condition=rng.integers(0, 10, (rows, 2), np.int32),
        sample=rng.integers(0, 99, rows, np.int32),
        epoch=np.zeros(rows, np.int32),
        weight=rng.integers(0, 2, rows).astype(np.float32),
    )


def host_steps(count, ranks):
    rng = np.random.default_rng(0)
    return [
        HostStep(
            number=7 + n,
            epoch=n // 3,
            batches=tuple(host_batch(rng, ranks * (m + 1)) for m in range(1 + n % 2)),
            problems=("bad",) * (n % 3),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(("count", "depth"), [(0, 1), (2, 3), (6, 0), (6, 1)])
def test_all_steps_arrive_in_order_with_the_hosts_values(mesh, depth, count):
    steps = host_steps(count, ranks_of(mesh))
    placed = list(place_ahead(iter(steps), mesh, depth))
    assert [step.number for step in placed] == [step.number for step in steps]
    for found, step in zip(placed, steps, strict=True):
        assert (found.epoch, found.problems) == (step.epoch, step.problems)
        assert found.wait_seconds >= 0
        for on_device, on_host in zip(found.batches, step.batches, strict=True):
            parts = map(jax.tree.leaves, (on_device, on_host))
            for device_part, host_part in zip(*parts, strict=True):
                assert device_part.dtype == host_part.dtype
                np.testing.assert_array_equal(device_part, host_part)


def pulling(steps, pulled):
    for step in steps:
        pulled.append(step.number)
        yield step


@pytest.mark.parametrize("depth", [0, None, 3])
def test_exactly_depth_further_steps_are_placed_while_one_is_used(mesh, depth):
    pulled, steps = [], host_steps(6, ranks_of(mesh))
    placed = place_ahead(pulling(steps, pulled), mesh, *[] if depth is None else [depth])
    for used, _ in enumerate(placed, start=1):  # by default one
        assert len(pulled) == min(used + (1 if depth is None else depth), len(steps))


def test_rows_are_split_over_the_ranks_in_order(mesh):
    (step,) = host_steps(1, ranks_of(mesh))
    (placed,) = place_ahead(iter([step]), mesh)
    (on_host,), (on_device,) = step.batches, placed.batches
    rows = len(on_host.sample) // ranks_of(mesh)
    for host_part, device_part in zip(*map(jax.tree.leaves, (on_host, on_device)), strict=True):
        assert device_part.sharding.is_equivalent_to(batch_sharding(mesh), host_part.ndim)
        shards = {shard.device: shard.data for shard in device_part.addressable_shards}
        for rank, device in enumerate(mesh.devices.flat):
            expected = host_part[rank * rows : (rank + 1) * rows]
            np.testing.assert_array_equal(shards[device], expected)


def test_an_error_of_the_loader_is_not_swallowed(mesh):
    def failing():
        yield from host_steps(1, ranks_of(mesh))
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        list(place_ahead(failing(), mesh))


def test_waiting_for_the_loader_is_measured(mesh, monkeypatch):
    clock = SimpleNamespace(now=0.0)

    def slow():
        for step, wait in zip(host_steps(2, ranks_of(mesh)), (2.0, 5.0), strict=True):
            clock.now += wait
            yield step

    monkeypatch.setattr("alload_jax.data.loader.time.perf_counter", lambda: clock.now)
    waits = [step.wait_seconds for step in place_ahead(slow(), mesh)]
    # The first step is requested after both are read, because one is placed ahead.
    assert waits == [7.0, 0.0]
