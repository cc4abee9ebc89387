"""When checkpoints are saved and committed, and what an earlier start has missed."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alload_jax.data.loader import PlacedStep
from alload_jax.training import CheckpointConfig, checkpoint_files
from alload_jax.training.callbacks import Callback, validating
from alload_jax.training.callbacks.validating import Checkpointing
from alload_jax.training.loop import Loop


class Saved:
    """Checkpoints in memory; a step is saved once."""

    def __init__(self):
        self.steps = []

    def save(self, step, state, recalibration):
        if step not in self.steps:
            self.steps.append(step)

    def check_writing(self):
        pass

    def wait(self):
        pass


class Processes:
    """The callbacks of processes with clocks of their own, as `place_ahead` and consensus run them.

    Whether a step is to be saved is read before the step before it has begun.
    """

    def __init__(self, monkeypatch, config, count=2, total=40):
        self.now, self.current = [0.0] * count, 0
        clock = SimpleNamespace(monotonic=lambda: self.now[self.current])
        monkeypatch.setattr(validating, "time", clock)
        self.saved = [Saved() for _ in range(count)]
        plan = SimpleNamespace(state=lambda: None)
        self.callbacks = [Checkpointing(each, config, plan) for each in self.saved]
        self.total = total

    def each(self, call):
        found = []
        for number, callback in enumerate(self.callbacks):
            self.current = number
            found.append(call(callback))
        return found

    def train(self, seconds):
        """Runs steps that take `seconds(process, step)`; returns the saved steps."""
        run = SimpleNamespace(done=0, state=None)
        self.each(lambda callback: callback.on_start(run))
        requested = {0: any(self.each(lambda callback: callback.wants_save()))}
        for number in range(self.total):
            requested[number + 1] = any(self.each(lambda callback: callback.wants_save()))
            step = PlacedStep(number, 0, (), (), 0, 0.0, save=requested[number])
            self.each(lambda callback, step=step: callback.on_step_start(run, step))
            for process in range(len(self.now)):
                self.now[process] += seconds(process, number)
            run.done = number + 1
            self.each(lambda callback, step=step: callback.on_step_end(run, step, {}))
            (due,) = set(self.each(lambda callback: callback.due(run)))
            if due:
                self.each(lambda callback: callback.act(run))
        assert self.saved[0].steps == self.saved[1].steps
        return self.saved[0].steps


def test_minutes_save_after_the_same_step_in_all_processes(monkeypatch):
    processes = Processes(monkeypatch, CheckpointConfig(every=None, minutes=1.0))
    # The first process reaches the minute first, in step 5 (of 0, 1, ...); the request counts for
    # the step after the next one, and not again until a minute has passed.
    steps = processes.train(lambda process, step: 11.0 if process == 0 else 10.5)
    assert steps == [8, 16, 24, 32, 40]


@given(st.lists(st.floats(0.0, 90.0), min_size=40, max_size=40), st.floats(0.2, 3.0))
def test_no_more_time_is_lost_than_the_minutes_and_some_steps(seconds, minutes):
    with pytest.MonkeyPatch.context() as monkeypatch:
        processes = Processes(monkeypatch, CheckpointConfig(every=None, minutes=minutes))
        steps = processes.train(lambda process, step: seconds[step])
    for first, last in zip([0, *steps], [*steps, 40], strict=True):
        if last < 40:
            assert sum(seconds[first:last]) >= 60 * minutes - 1e-6
        # Steps whose request was made before the minutes had passed are not saved.
        assert sum(seconds[first : last - 3]) < 60 * minutes + 1e-6


def test_steps_and_minutes_go_together(monkeypatch):
    processes = Processes(monkeypatch, CheckpointConfig(every=10, minutes=1.0))
    assert processes.train(lambda process, step: 1.0) == [10, 20, 30, 40]
    processes = Processes(monkeypatch, CheckpointConfig(every=25, minutes=0.25))
    assert processes.train(lambda process, step: 1.0) == [17, 25]  # which began anew


class Noted(Callback):
    def __init__(self, missed=False):
        self.calls, self.misses = [], missed

    def missed(self, run):
        return self.misses

    def act(self, run):
        self.calls.append(["act", run.done])

    def on_pause(self, run):
        self.calls.append(["pause", run.done])

    def on_resume(self, run):
        self.calls.append(["resume", run.done])

    def on_step_start(self, run, step):
        self.calls.append(["step", step.number])


@pytest.mark.parametrize("start", [0, 3, 5])
def test_what_an_earlier_start_has_missed_is_done_before_the_first_step(start):
    plain, missed = Noted(), Noted(missed=True)
    trainer = SimpleNamespace(state=None, step=lambda step: {})
    loop = Loop(trainer, start, 5, [plain, missed])
    loop.run(PlacedStep(number, 0, (), (), 0, 0.0) for number in range(start, 5))
    steps = [["step", number] for number in range(start, 5)]
    if start != 3:  # nothing is missed at the start, and at the end all is done again
        assert plain.calls == missed.calls == steps
    else:
        assert plain.calls == [["pause", 3], ["resume", 3], *steps]
        assert missed.calls == [["pause", 3], ["act", 3], ["resume", 3], *steps]


# ---------------------------------------------------------------- barriers, with threads


@pytest.fixture
def waited(monkeypatch):
    keys = []

    def wait(*, key, timeout_ms):
        keys.append((key, timeout_ms))

    monkeypatch.setattr(checkpoint_files.multihost, "get_barrier_sync_fn", lambda: wait)
    return keys


def write_and_tell(barrier, failure):
    """As Orbax does it: the barrier stands where a thread passes whether it has failed or not."""
    try:
        if failure is not None:
            raise failure
    finally:
        barrier(key="told", timeout_ms=9)


@pytest.mark.parametrize("failure", [OSError("no space left"), None])
def test_a_thread_that_has_failed_does_not_wait_and_others_do(waited, failure):
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(write_and_tell, checkpoint_files.commit_barrier(), failure)
    assert ended.exception() is failure
    assert waited == ([] if failure else [("told", 9)])


def test_the_main_thread_waits_while_it_handles_an_error(waited):
    """A run that is stopped by a signal or a failure still saves."""
    with pytest.raises(OSError, match="stopped"):
        write_and_tell(checkpoint_files.commit_barrier(), OSError("stopped"))
    assert waited == [("told", 9)]
