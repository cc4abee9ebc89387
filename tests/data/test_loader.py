"""Steps that are read ahead, again where reading fails, and placed on the devices ahead."""

import contextlib
import copy
import multiprocessing
import signal
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from data_helpers import SpyReader, assert_holds, classes, manifest_of, plan_over, says
from patience import wait_until

from alload_jax.data import loader as loading
from alload_jax.data.batch import Batch
from alload_jax.data.collate import BucketedCollation, Collator, HostStep
from alload_jax.data.loader import LoaderConfig, PatientReader, StepLoader, place_ahead
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import BadRecordError, StoreReader
from alload_jax.errors import InputError
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh, ranks_of


@pytest.fixture(scope="module")
def manifest():
    sizes = [(1, 4, 4), (5, 4, 4), (1, 8, 8)]
    return manifest_of([sizes[n % 3] for n in range(40)], [1] * 40)


@pytest.fixture(scope="module")
def plan(manifest):
    return plan_over(manifest, micro_batches=2)


@pytest.fixture(scope="module")
def collate(manifest):
    collation = BucketedCollation(manifest, classes(1))
    return Collator(SpyReader(manifest), frozenset({0, 1}), collation)


def load(plan, collate, first, stop, **config):
    with StepLoader(plan, range(first, stop), collate, LoaderConfig(**config)) as loader:
        return list(loader)


def assert_equal_steps(found, expected):
    assert [step.number for step in found] == [step.number for step in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.epoch, one.problems) == (other.epoch, other.problems)
        jax.tree.map(np.testing.assert_array_equal, one.batches, other.batches)


@pytest.mark.parametrize(("threads", "read_ahead"), [(1, 1), (8, 3)])
def test_steps_come_in_the_plans_order_from_any_first(plan, collate, threads, read_ahead):
    stop, options = 2 * plan.steps_per_epoch + 1, {"threads": threads, "read_ahead": read_ahead}
    expected = [collate(plan.step(n)) for n in range(stop)]
    for first in (0, 1, plan.steps_per_epoch - 1, plan.steps_per_epoch, stop - 1):
        assert_equal_steps(load(plan, collate, first, stop, **options), expected[first:])


def test_an_error_while_reading_reaches_the_training_loop_whose_end_stops_reading(plan, collate):
    def fails_at_two(step):
        if step.index == 2:
            raise InputError("the disk is gone; mount it")
        return collate(step)

    threads = threading.active_count()
    with StepLoader(plan, range(9), fails_at_two, LoaderConfig()) as loader:
        assert [next(loader).number, next(loader).number] == [0, 1]
        with pytest.raises(InputError, match="the disk is gone; mount it"):
            next(loader)
    loader = StepLoader(plan, range(10**6), collate, LoaderConfig())
    next(loader)
    loader.close()
    loader.close()
    wait_until(lambda: threading.active_count() <= threads)


@pytest.mark.slow
def test_worker_processes_give_the_same_steps(store):
    manifest = read_manifest(store)
    plan = plan_over(manifest)
    collation = BucketedCollation(manifest, classes(2))
    collate = Collator(StoreReader(manifest), frozenset({0, 1}), collation)
    stop = plan.steps_per_epoch + 2
    found, expected = (load(plan, collate, 1, stop, processes=number) for number in (1, 0))
    assert_equal_steps(found, expected)


@pytest.mark.slow
def test_a_worker_that_was_killed_is_replaced_and_no_step_is_lost(store, capsys):
    """As by the kernel where memory is full, or by Ctrl-C while it starts."""
    manifest = read_manifest(store)
    plan, collation = plan_over(manifest), BucketedCollation(manifest, classes(2))
    collate, stop = Collator(StoreReader(manifest), frozenset(), collation), 9
    config = LoaderConfig(processes=1, read_ahead=1)
    with StepLoader(plan, range(1, stop), collate, config) as loader:
        found = [next(loader)]
        for worker in multiprocessing.active_children():
            worker.kill()
        found += loader
        assert_equal_steps(found, load(plan, collate, 1, stop))
    assert "of data.loader was killed before step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "full"),
    [(-signal.SIGKILL, "the host's memory"), (-signal.SIGBUS, "/dev/shm, which .* larger,")],
)
def test_a_worker_that_is_killed_again_ends_the_run(code, full, plan, collate, monkeypatch):
    class Killed:
        def __next__(self):
            raise RuntimeError(f"Worker process ended unexpectedly with exit code {code}. See")

        def close(self):
            """Nothing is open."""

    monkeypatch.setattr(StepLoader, "_begin", lambda _: Killed())
    with pytest.raises(
        InputError, match=rf"step 3 \(exit code {code}\), and again; where {full} is full, lower"
    ):
        load(plan, collate, 2, 9)


def test_processes_that_cannot_begin_are_told(plan, collate, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", full)
    with says("No space left", "where /dev/shm, which", "is full, lower data.loader.processes"):
        load(plan, collate, 0, 9, processes=1)


@pytest.mark.parametrize("between", [1, 3])
def test_workers_that_are_killed_again_and_again_end_the_run(between, plan, monkeypatch):
    """But not those between which as many steps are read as are ahead."""

    class KilledSoon:
        def __init__(self):
            self.left = between

        def __next__(self):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("Worker process was terminated unexpectedly with exit code -9.")

        def close(self):
            """Nothing is open."""

    monkeypatch.setattr(StepLoader, "_begin", lambda _: KilledSoon())
    loader = StepLoader(plan, range(100), None, LoaderConfig(processes=1, read_ahead=2))
    ends = pytest.raises(InputError, match=r"before step 7 .*, and again; .* lower")
    with ends if between == 1 else contextlib.nullcontext():
        for _ in range(50):
            next(loader)


def test_impossible_settings_are_refused():
    for name, value, least in (
        ("threads", 0, 1),
        ("read_ahead", 0, 1),
        ("processes", -1, 0),
        ("max_bad_records", -1, 0),
    ):
        with says(f"data.loader.{name}", value, least):
            LoaderConfig(**{name: value})
        LoaderConfig(**{name: least})


class Shaky:
    """A source that fails so often before a sample can be read."""

    manifest = None

    def __init__(self, failures):
        self.failures, self.reads, self.closed = dict(failures), [], 0

    def read(self, sample):
        self.reads.append(sample)
        if self.failures.get(sample, 0):
            self.failures[sample] -= 1
            raise BadRecordError(f"sample {sample} cannot be read (input/output error)")
        return {"latents": np.full(1, sample)}

    def close(self):
        self.closed += 1


def test_a_failure_that_passes_is_not_seen_and_one_that_stays_is_waited_for_once(monkeypatch):
    waits = []
    monkeypatch.setattr(loading.time, "sleep", waits.append)
    source = Shaky({3: 10**6, 7: 3})
    reader = PatientReader(source, (0.1, 0.5, 2.0))
    assert (reader.read(8)["latents"], source.closed, waits) == (8, 0, [])
    assert reader.read(7)["latents"] == 7
    assert (source.closed, waits) == (3, [0.1, 0.5, 2.0])  # files are opened again
    for attempts in (9, 10, 11):
        with pytest.raises(BadRecordError, match="sample 3 cannot be read"):
            reader.read(3)
        assert len(source.reads) == attempts
    source.failures[3] = 0  # restored meanwhile
    assert reader.read(3)["latents"] == 3
    source.failures[3] = 1
    assert reader.read(3)["latents"] == 3


def test_a_reader_travels_to_another_process(store, samples):
    reader = PatientReader(StoreReader(read_manifest(store)), ())
    received = copy.deepcopy(reader)  # Grain's workers get its state in the same way
    assert_holds(received.read(0), samples[0])
    assert len(received.manifest) == len(samples)


@pytest.fixture(scope="module", params=[MeshConfig(), MeshConfig(fsdp=jax.device_count())])
def mesh(request):
    return make_mesh(request.param)


def host_batch(rng, rows):
    latents = rng.normal(size=(rows, 1, 4, 4, 1)).astype(np.float32)
    condition, sample = (
        rng.integers(0, 10, (rows, 2), np.int32),
        rng.integers(0, 99, rows, np.int32),
    )
    weight = rng.integers(0, 2, rows).astype(np.float32)
    return Batch(latents, condition, sample, np.zeros(rows, np.int32), weight)


def host_steps(count, ranks):
    rng = np.random.default_rng(0)
    for n in range(count):
        batches = tuple(host_batch(rng, ranks * (m + 1)) for m in range(1 + n % 2))
        yield HostStep(7 + n, n // 3, batches, ("bad",) * (n % 3))


@pytest.mark.parametrize(("count", "depth"), [(0, 1), (2, 3), (6, 0), (6, None)])
def test_steps_arrive_in_order_with_the_hosts_values_while_depth_more_are_placed(
    mesh, depth, count
):
    steps, pulled = list(host_steps(count, ranks_of(mesh))), []

    def pulling():
        for step in steps:
            pulled.append(step.number)
            yield step

    placed = place_ahead(pulling(), mesh, *[] if depth is None else [depth])
    for used, (found, step) in enumerate(zip(placed, steps, strict=True), 1):
        assert len(pulled) == min(used + (1 if depth is None else depth), count)  # by default 1
        assert found.wait_seconds >= 0
        assert_equal_steps([found], [step])
        for device_part, host_part in zip(
            *map(jax.tree.leaves, (found.batches, step.batches)), strict=True
        ):
            assert device_part.dtype == host_part.dtype
            assert device_part.sharding.is_equivalent_to(batch_sharding(mesh), host_part.ndim)
            rows = len(host_part) // ranks_of(mesh)
            shards = {shard.device: shard.data for shard in device_part.addressable_shards}
            for rank, device in enumerate(mesh.devices.flat):
                expected = host_part[rank * rows : (rank + 1) * rows]
                np.testing.assert_array_equal(shards[device], expected)


def test_waiting_for_the_loader_is_measured_and_its_error_is_not_swallowed(mesh, monkeypatch):
    clock = SimpleNamespace(now=0.0)

    def slow():
        for step, wait in zip(host_steps(2, ranks_of(mesh)), (2.0, 5.0), strict=True):
            clock.now += wait
            yield step
        yield from failing

    monkeypatch.setattr("alload_jax.data.loader.time.perf_counter", lambda: clock.now)
    failing = ()
    waits = [step.wait_seconds for step in place_ahead(slow(), mesh)]
    # The first step is requested after both are read, because one is placed ahead.
    assert waits == [7.0, 0.0]
    failing = (1 / 0 for _ in range(1))
    with pytest.raises(ZeroDivisionError):
        list(place_ahead(slow(), mesh))
