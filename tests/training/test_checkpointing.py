"""When checkpoints are saved and committed, and what an earlier start has missed."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alload_jax.data.loader import PlacedStep
from alload_jax.training import LOSS, MEASURED_SET, CheckpointConfig, checkpoint_files
from alload_jax.training.callbacks import Callback, validating
from alload_jax.training.callbacks.validating import Checkpointing, Validating
from alload_jax.training.loop import Loop
from alload_jax.training.validator import ClassErrors


class Saved(list):
    """Checkpoints in memory: their steps."""

    def save(self, step, state, recalibration):
        if step not in self:
            self.append(step)

    def check_writing(self):
        pass

    def wait(self):
        self.on_disk = len(self)


def saved_steps(monkeypatch, config, seconds, count=2, total=40):
    """The steps that all processes save, where a step takes `seconds(process, step)`.

    As `place_ahead` and consensus run them: whether a step is to be saved is read before the step
    before it has begun.
    """
    now, current = [0.0] * count, [0]
    clock = SimpleNamespace(monotonic=lambda: now[current[0]])
    monkeypatch.setattr(validating, "time", clock)
    saved = [Saved() for _ in range(count)]
    plan = SimpleNamespace(state=lambda step: None)
    callbacks = [Checkpointing(each, config, plan) for each in saved]

    def each(call):
        found = []
        for current[0], callback in enumerate(callbacks):
            found.append(call(callback))
        return found

    run = SimpleNamespace(done=0, state=None)
    each(lambda callback: callback.on_start(run))
    requested = {0: any(each(lambda callback: callback.wants_save()))}
    for number in range(total):
        requested[number + 1] = any(each(lambda callback: callback.wants_save()))
        step = PlacedStep(number, 0, (), (), 0, 0.0, save=requested[number])
        each(lambda callback, step=step: callback.on_step_start(run, step))
        for process in range(count):
            now[process] += seconds(process, number)
        run.done = number + 1
        each(lambda callback, step=step: callback.on_step_end(run, step, {}))
        (due,) = set(each(lambda callback: callback.due(run)))
        if due:
            each(lambda callback: callback.act(run))
    assert all(steps == saved[0] for steps in saved)
    found = list(saved[0])
    each(lambda callback: callback.on_stop(run))
    assert [steps.on_disk for steps in saved] == [len({*found, total})] * count
    return found


@pytest.mark.parametrize(
    ("config", "seconds", "steps"),
    [
        # The first process reaches the minute first, in step 5 (of 0, 1, ...); the request counts
        # for the step after the next one, and not again until a minute has passed.
        ({"every": None, "minutes": 1.0}, (11.0, 10.5), [8, 16, 24, 32, 40]),
        ({"every": 10, "minutes": 1.0}, (1.0, 1.0), [10, 20, 30, 40]),
        ({"every": 25, "minutes": 0.25}, (1.0, 1.0), [17, 25]),  # which began anew
    ],
)
def test_steps_and_minutes_save_after_the_same_step_in_all_processes(
    monkeypatch, config, seconds, steps
):
    found = saved_steps(
        monkeypatch, CheckpointConfig(**config), lambda process, _: seconds[process]
    )
    assert found == steps


@given(st.lists(st.floats(0.0, 90.0), min_size=40, max_size=40), st.floats(0.2, 3.0))
def test_no_more_time_is_lost_than_the_minutes_and_some_steps(seconds, minutes):
    config = CheckpointConfig(every=None, minutes=minutes)
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps = saved_steps(monkeypatch, config, lambda process, step: seconds[step])
    for first, last in zip([0, *steps], [*steps, 40], strict=True):
        if last < 40:
            assert sum(seconds[first:last]) >= 60 * minutes - 1e-6
        # Steps whose request was made before the minutes had passed are not saved.
        assert sum(seconds[first : last - 3]) < 60 * minutes + 1e-6


class Noted(Callback):
    def __init__(self):
        self.calls = []

    def act(self, run):
        self.calls.append(["act", run.done])

    def on_pause(self, run):
        self.calls.append(["pause", run.done])

    def on_resume(self, run):
        self.calls.append(["resume", run.done])

    def on_step_start(self, run, step):
        self.calls.append(["step", step.number])


class Missed(Noted):
    def missed(self, run):
        return True


@pytest.mark.parametrize("start", [0, 3, 5])
def test_what_an_earlier_start_has_missed_is_done_before_the_first_step(start):
    plain, missed = Noted(), Missed()
    trainer = SimpleNamespace(state=None, step=lambda step: {})
    loop = Loop(trainer, start, 5, [plain, missed])
    loop.run(PlacedStep(number, 0, (), (), 0, 0.0) for number in range(start, 5))
    steps = [["step", number] for number in range(start, 5)]
    if start != 3:  # nothing is missed at the start, and at the end all is done again
        assert plain.calls == missed.calls == steps
    else:
        assert plain.calls == [["pause", 3], ["resume", 3], *steps]
        assert missed.calls == [["pause", 3], ["act", 3], ["resume", 3], *steps]


@pytest.mark.parametrize(
    ("every", "known", "start"),
    [(2, [], 0), (2, [2], 4), (2, [2, 4], 4), (2, [2, 4, 6], 6), (None, [], 0)],
)
def test_each_validation_is_done_once_whatever_an_earlier_start_has_done(every, known, start):
    rows = [{"step": step, LOSS: 1.0, MEASURED_SET: "these"} for step in known]
    log = SimpleNamespace(validations=rows, write=rows.append)
    errors = [ClassErrors("1x8x8", np.ones((1, 1)), np.ones(1, bool))]
    validator = SimpleNamespace(levels=[0.5], measured_set="these", measure=lambda state: errors)
    best, save = Mock(), Mock()
    callback = Validating(validator, every, log, Mock(), Mock(), best, save)
    loop = Loop(SimpleNamespace(state=None, step=lambda step: {}), start, 6, [callback])
    loop.run(PlacedStep(number, 0, (), (), 0, 0.0) for number in range(start, 6))
    assert [row["step"] for row in rows] == ([2, 4, 6] if every else [6])
    assert best.add.call_count == save.call_count == len(rows) - len(known)
    assert best.finish.call_count == (start < 6)


@pytest.mark.parametrize("failure", [OSError("no space left"), None])
def test_at_the_barrier_only_a_thread_that_has_failed_does_not_wait(monkeypatch, failure):
    """The main thread waits, as a run that a failure stops still saves."""
    waited = []

    def wait(*, key, timeout_ms):
        waited.append((key, timeout_ms))

    def write_and_tell(barrier, failure):
        """As Orbax does it: a thread passes the barrier whether it has failed or not."""
        try:
            if failure is not None:
                raise failure
        finally:
            barrier(key="told", timeout_ms=9)

    monkeypatch.setattr(checkpoint_files.multihost, "get_barrier_sync_fn", lambda: wait)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(write_and_tell, checkpoint_files.commit_barrier(), failure)
    assert ended.exception() is failure
    assert waited == ([] if failure else [("told", 9)])
    with pytest.raises(OSError, match="stopped"):
        write_and_tell(checkpoint_files.commit_barrier(), OSError("stopped"))
    assert waited[-1] == ("told", 9)
    assert len(waited) == (1 if failure else 2)
