"""A run that makes no progress says what it waits for, and ends."""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE, wait_until
from training_runs import descendants, errors, lines_of

from alload_jax.data.manifest import read_manifest
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.processes import waiting_for, waits
from alload_jax.training import WatchdogConfig
from alload_jax.training.callbacks.watchdog import Watchdog, stacks_name
from alload_jax.training.signals import StopRequest


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Loop:
    done, total, signal = 0, 100, 0


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A watchdog without its thread: the test sets the time, which `later` does, and checks."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    clock, ended = Clock(), []

    def make(started=True, **config):
        dog = Watchdog(
            *(WatchdogConfig(**config), tmp_path / "run", Cluster(), StopRequest()),
            *(lambda: "continue with: train", clock, ended.append),
        )
        if started:
            dog.on_start(Loop())
        return dog, later, ended

    def later(dog, seconds):
        clock.now += seconds
        dog.check()

    later.clock = clock
    return make


def steps(dog, clock, seconds):
    run = Loop()
    for n, each in enumerate(seconds):
        clock.now += each
        run.done = n + 1
        dog.on_step_end(run, None, {})


@given(
    st.lists(st.floats(0.01, 500), min_size=1, max_size=60),
    st.floats(1.5, 50),
    st.floats(1, 1000),
)
def test_a_step_may_take_a_multiple_of_the_median_of_recent_ones(seconds, factor, least):
    clock = Clock()
    config = WatchdogConfig(step_factor=factor, step_seconds=least)
    dog = Watchdog(config, Path(), Cluster(), StopRequest(), str, clock)
    dog._pausing = False
    dog.progress()
    steps(dog, clock, seconds)
    recent = sorted(seconds[-33:])
    half = len(recent) // 2
    median = recent[half] if len(recent) % 2 else (recent[half - 1] + recent[half]) / 2
    assert dog.limit() == pytest.approx(max(least, factor * median), rel=1e-6)


def test_it_warns_once_and_then_ends_the_run(watched, tmp_path, capsys):
    dog, later, ended = watched(step_seconds=40.0, step_factor=10.0)
    steps(dog, later.clock, [2.0, 2.0, 3.0])
    said = []
    for seconds in (9, 1, 1, 1, 28, 1):
        later(dog, seconds)
        said.append(capsys.readouterr().err.splitlines())
        assert ended == ([1] if later.clock.now > 147 else [])
    *quiet, (warning,), again, still, (error,) = said
    assert (quiet, again, still) == ([[], []], [], [])
    assert warning.startswith("warning: no progress for 11 s (usually 2 s) after step 3: it waits")
    assert warning.endswith("the run ends after 40 s")
    assert error.startswith("error: no progress for 41 s")
    assert error.endswith("continue with: train")
    assert "test_watchdog.py" in (tmp_path / "run" / stacks_name(0)).read_text()


def test_progress_and_pauses_are_no_stalls(watched, capsys):
    dog, later, ended = watched(step_seconds=10.0, step_factor=5.0, pause_seconds=1000.0)
    steps(dog, later.clock, [1.0] * 5)
    dog.on_pause(Loop())
    later(dog, 200)
    dog.on_resume(Loop())
    later(dog, 2)
    steps(dog, later.clock, [8.0, 8.0])
    dog.check()
    assert not ended
    assert capsys.readouterr().err == ""
    dog.on_stop(Loop())
    later(dog, 1001)
    assert ended == [1]
    dog.on_finish(Loop())
    assert dog._closed.is_set()  # its thread ends


def test_a_run_that_is_asked_to_stop_and_cannot_ends_sooner(watched, capsys):
    dog, later, ended = watched(step_seconds=600.0)
    steps(dog, later.clock, [1.0])
    dog._stop.request(signal.SIGTERM)
    later(dog, 60)
    assert not ended
    later(dog, 1)
    assert ended == [1]
    assert "error: SIGTERM: the run cannot save: no progress for 61 s" in capsys.readouterr().err


def test_a_start_is_watched_from_its_first_second(watched, monkeypatch, capsys):
    """It may take as long as work between steps, and is told as soon as a step is."""
    started = []
    dog, later, ended = watched(False, step_seconds=40.0, pause_seconds=1000.0)
    monkeypatch.setattr(threading.Thread, "start", lambda self: started.append(self.name))
    with dog:
        assert started == ["watchdog"]
        for waits, said in ((9, 0), (2, 1), (2, 0)):
            later(dog, waits)
            assert len(capsys.readouterr().err.splitlines()) == said
        dog.progress()
        later(dog, 11)
        assert "no progress for 11 s before the first step" in capsys.readouterr().err
        later(dog, 990)
    assert ended == [1]


def test_a_suspended_process_does_not_count_the_time(watched):
    """Ctrl-Z and fg, or a laptop that slept."""
    dog, later, ended = watched(step_seconds=3.0, step_factor=1.0)
    clock, began = later.clock, later.clock.now

    class Waits:
        """Of the watchdog between looks: time passes, once as in a process that was suspended."""

        looks = 0

        def wait(self, seconds):
            self.looks += 1
            clock.now += 1000.0 if self.looks == 5 else seconds
            return bool(ended) or self.looks > 200

    dog._closed = Waits()
    dog._loop()
    assert ended
    assert clock.now - began == pytest.approx(1003.0, abs=0.2)


@pytest.mark.parametrize("name", ["step_factor", "step_seconds", "pause_seconds"])
def test_times_must_be_positive(name):
    with pytest.raises(InputError, match=rf"watchdog.{name} is -1"):
        WatchdogConfig(**{name: -1.0})


def test_a_manifest_that_never_comes_is_named(digits_folder, monkeypatch):
    named = []

    def hangs(*_, **__):
        named.append(waiting_for(sys._getframe()))
        raise OSError("as if it had waited for ever")

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", hangs)
    with pytest.raises(InputError):
        read_manifest(digits_folder)
    assert named == ["for the manifest to be read"]


def test_functions_of_every_kind_are_marked_and_the_innermost_is_named():
    def here():
        return waiting_for(sys._getframe())

    @waits("for a class")
    class Marked:
        def method(self):
            return here()

        @property
        def value(self):
            return here()

        @classmethod
        def of_class(cls):
            return here()

    @contextlib.contextmanager
    @waits("for a function")
    def opened():
        yield Marked().value, here()

    assert here().endswith("test_watchdog.py:here")
    marked = Marked()
    assert {marked.method(), marked.value, Marked.of_class()} == {"for a class"}
    with opened() as words:
        assert words == ("for a class", "for a function")


@pytest.mark.slow
def test_processes_that_wait_for_a_stalled_one_name_it(runs, monkeypatch):
    """The loader of one of two processes stops, as on a dead mount; the other waits for it."""
    start_clocks = runs.hold_clocks(monkeypatch)
    flags = ("--data.loader.processes", "1", "--watchdog.step_seconds", "10")
    flags = (*flags, "--planning.ranks", "2")
    both = runs.start_together(2, *flags, "--run.steps", "100000")
    metrics = runs.folder / "run" / "metrics.jsonl"
    wait_until(lambda: lines_of(metrics) > 14, both[0])
    workers = workers_of(both[1].pid)
    assert workers
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    start_clocks()
    texts = ends_of(both, workers)
    assert [process.returncode for process in both] == [1, 1]
    assert "process 1 of 2" in texts[0], "\n".join(texts)
    (line,) = [line for line in errors(texts[1]) if line.startswith("error: ")]
    assert "it waits for the loader to read its samples" in line
    assert "Thread" in (runs.folder / "run" / stacks_name(1)).read_text()
    # The run's folder is free, and its newest checkpoint whole.
    runs.finish("--planning.ranks", "2", "--run.steps", str(lines_of(metrics) + 1))


def ends_of(processes, stopped):
    """What processes say on stderr until they end; stopped ones, which hold it open, are killed."""
    try:
        for process in processes:
            process.wait(timeout=PATIENCE)
    finally:
        for each in (*stopped, *(process.pid for process in processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
    return [process.communicate()[1] for process in processes]


def workers_of(pid):
    """Processes that a run has started, and theirs, but for helpers of Python."""
    words = {each: Path(f"/proc/{each}/cmdline").read_text() for each in descendants(pid)}
    return [each for each, said in words.items() if "resource_tracker import" not in said]
