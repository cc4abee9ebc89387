import copy
import itertools
import threading

import numpy as np
import pytest
from data_helpers import SpyReader, assert_holds, assert_says, classes, manifest_of, plan_over
from patience import PATIENCE, wait_until

from alload_jax.data import loader as loading
from alload_jax.data.collate import BucketedCollation, Collator
from alload_jax.data.loader import LoaderConfig, PatientReader, StepLoader
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import BadRecordError, StoreReader
from alload_jax.errors import InputError


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
    for found_step, expected_step in zip(found, expected, strict=True):
        assert found_step.epoch == expected_step.epoch
        assert found_step.problems == expected_step.problems
        pairs = zip(found_step.batches, expected_step.batches, strict=True)
        for found_batch, expected_batch in pairs:
            for name in expected_batch._fields:
                np.testing.assert_array_equal(
                    getattr(found_batch, name), getattr(expected_batch, name)
                )


# ---------------------------------------------------------------- reading ahead


@pytest.mark.parametrize(("threads", "read_ahead"), [(1, 1), (8, 3), (4, 100)])
def test_steps_come_in_the_plans_order(plan, collate, threads, read_ahead):
    stop = 2 * plan.steps_per_epoch + 1
    found = load(plan, collate, 0, stop, threads=threads, read_ahead=read_ahead)
    assert_equal_steps(found, [collate(plan.step(n)) for n in range(stop)])


def test_slow_steps_are_not_overtaken(plan, collate):
    read = [threading.Event() for _ in range(12)]

    def sometimes_slow(step):
        if step.index % 4 == 0:
            assert read[step.index + 1].wait(PATIENCE)
        found = collate(step)
        read[step.index].set()
        return found

    found = load(plan, sometimes_slow, 0, 12, threads=4)
    assert [step.number for step in found] == list(range(12))


def test_starting_late_equals_skipping(plan, collate):
    stop = plan.steps_per_epoch + 4
    whole = load(plan, collate, 0, stop)
    for first in (1, plan.steps_per_epoch - 1, plan.steps_per_epoch, stop - 1):
        assert_equal_steps(load(plan, collate, first, stop), whole[first:])


@pytest.mark.parametrize(("first", "stop"), [(0, 2), (5, 5), (7, 5)])
def test_a_run_that_is_over_has_no_steps_left(plan, collate, first, stop):
    with StepLoader(plan, range(first, stop), collate, LoaderConfig()) as loader:
        assert len(list(loader)) == max(0, stop - first)
        assert next(loader, None) is None
        assert next(loader, None) is None


def test_at_most_the_configured_steps_are_read_ahead(plan, collate):
    begun, taken, ahead = [], 0, []

    def counted(step):
        begun.append(step.index)
        ahead.append(len(begun) - taken)
        return collate(step)

    config = LoaderConfig(threads=2, read_ahead=3)
    with StepLoader(plan, range(1000), counted, config) as loader:
        while taken < 100:
            taken += 1
            next(loader)
            wait_until(lambda taken=taken: len(begun) >= taken + 2)
    assert max(ahead) <= 3


@pytest.mark.parametrize("taken", [0, 5])
def test_closing_or_an_error_in_the_training_loop_stops_reading(plan, collate, taken):
    begun = []

    def counted(step):
        begun.append(step.index)
        return collate(step)

    def train():
        with StepLoader(plan, range(10**6), counted, LoaderConfig()) as loader:
            list(itertools.islice(loader, taken))
            raise RuntimeError("out of memory")

    threads = threading.active_count()
    loader = StepLoader(plan, range(10**6), counted, LoaderConfig())
    list(itertools.islice(loader, taken))
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="out of memory"):
        train()
    wait_until(lambda: threading.active_count() <= threads)  # so that none is begun any more
    assert len(begun) < 10**6


def test_an_error_while_reading_reaches_the_training_loop(plan, collate):
    def fails_at_two(step):
        if step.index == 2:
            raise InputError("the disk is gone; mount it")
        return collate(step)

    with StepLoader(plan, range(9), fails_at_two, LoaderConfig()) as loader:
        assert [next(loader).number, next(loader).number] == [0, 1]
        with pytest.raises(InputError, match="the disk is gone; mount it"):
            next(loader)


def test_worker_processes_give_the_same_steps(store):
    manifest = read_manifest(store)
    plan = plan_over(manifest)
    collation = BucketedCollation(manifest, classes(2))
    collate = Collator(StoreReader(manifest), frozenset({0, 1}), collation)
    stop = plan.steps_per_epoch + 2
    assert_equal_steps(
        load(plan, collate, 1, stop, processes=1), load(plan, collate, 1, stop, processes=0)
    )


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("threads", 0, 1), ("read_ahead", -1, 1), ("processes", -1, 0), ("max_bad_records", -2, 0)],
)
def test_impossible_settings_are_refused(name, value, least):
    with pytest.raises(InputError) as error:
        LoaderConfig(**{name: value})
    assert_says(error, f"data.loader.{name}", value, least)


# ---------------------------------------------------------------- reading again


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


@pytest.mark.parametrize("failures", [0, 3])
def test_a_failure_that_passes_is_not_seen(failures, monkeypatch):
    waits = []
    monkeypatch.setattr(loading.time, "sleep", waits.append)
    source = Shaky({7: failures})
    reader = PatientReader(source, (0.1, 0.5, 2.0))
    assert reader.read(7)["latents"] == 7
    assert source.closed == failures  # files are opened again
    assert waits == [0.1, 0.5, 2.0][:failures]


def test_a_sample_that_stays_damaged_is_waited_for_once():
    source = Shaky({3: 10**6})
    reader = PatientReader(source, (0.0, 0.0))
    for attempts in (3, 4, 5):
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
