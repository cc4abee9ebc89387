"""The checkpoints with the lowest validation loss are kept beside the newest."""

import argparse
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alload_jax.commands.flags import add_run_flags
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.training import CheckpointConfig
from alload_jax.training.checkpoint import (
    BEST_NAME,
    BestCheckpoints,
    Checkpoints,
    Measured,
    best_step,
)
from alload_jax.training.restore import find_step

LOSSES = {2: 0.9, 4: 0.5, 6: 0.7, 8: 0.5, 10: 0.8, 12: 0.6}


@pytest.fixture
def state(tiny_state):
    return tiny_state[0]


def opened(folder, **settings):
    return Checkpoints(folder / "checkpoints", CheckpointConfig(**settings), {})


def on_disk(folder):
    places = (folder / "checkpoints").iterdir()
    return {int(place.name) for place in places if place.name.isdigit()}


class Saved:
    """Checkpoints in memory."""

    def __init__(self, newest):
        self.newest, self.there, self.chosen = newest, [], frozenset()

    def steps(self):
        return frozenset(self.there)

    def keep(self, steps):
        self.chosen = frozenset(steps)

    def save(self, step):
        after = [*self.there, step]
        self.there = [each for each in after if each in {*after[-self.newest :], *self.chosen}]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sets(st.integers(1, 20)),
    st.integers(0, 20),
)
def test_the_best_of_all_are_there_whenever_a_run_is_continued(
    tmp_path_factory, losses, count, intervals, stop
):
    """Steps are saved where they are among the best, and some at an interval."""
    folder, saved = tmp_path_factory.mktemp("run"), Saved(newest=1)
    best = BestCheckpoints(folder, count, saved, Cluster())
    best.begin([])
    for step, loss in enumerate(losses, 1):
        if step == stop + 1:  # another start knows only what is in the log and on disk
            best = BestCheckpoints(folder, count, saved, Cluster())
            best.begin([Measured(old, at) for at, old in enumerate(losses[:stop], 1)])
        if best.add(Measured(loss, step)) or step in intervals:
            saved.save(step)
        lowest = sorted(range(1, step + 1), key=lambda at: (losses[at - 1], at))[:count]
        assert {each.step for each in best.best} == set(lowest) <= set(saved.there)
        assert best_step(folder, saved.there) == lowest[0]


@pytest.mark.slow
def test_orbax_keeps_the_best_beside_the_newest_and_regular_ones(tmp_path, state):
    with opened(tmp_path, keep=1, keep_every=10, keep_best=2) as checkpoints:
        best = BestCheckpoints(tmp_path, 2, checkpoints, Cluster())
        best.begin([])
        for step in range(1, 13):
            checkpoints.save(step, state)
            if step in LOSSES:  # which is known after the checkpoint is saved
                best.add(Measured(LOSSES[step], step))
        checkpoints.wait()
        assert on_disk(tmp_path) == {4, 8, 10, 12}
        content = json.loads((tmp_path / BEST_NAME).read_text())
        assert content == {"best": [{"step": 4, "loss": 0.5}, {"step": 8, "loss": 0.5}]}
        assert best.add(Measured(0.4, 12))
        best.finish()
    assert on_disk(tmp_path) == {4, 10, 12}
    assert find_step(tmp_path / "checkpoints", "best") == 12
    assert find_step(tmp_path / "checkpoints") == 12


def test_a_damaged_best_checkpoint_is_no_longer_the_best(tmp_path, state, capsys):
    with opened(tmp_path, keep=2, keep_best=1) as checkpoints:
        best = BestCheckpoints(tmp_path, 1, checkpoints, Cluster())
        best.begin([])
        for step, loss in ((2, 0.9), (4, 0.7), (6, 0.3)):
            best.add(Measured(loss, step))
            checkpoints.save(step, state)
    file = max((tmp_path / "checkpoints" / "6").rglob("*"), key=lambda each: each.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    with opened(tmp_path, keep=2, keep_best=1) as checkpoints:
        start = checkpoints.continue_from(Cluster())
        best = BestCheckpoints(tmp_path, 1, checkpoints, Cluster())
        best.begin([Measured(0.9, 2), Measured(0.7, 4), Measured(0.3, 6)])
        assert (start, best.best) == (4, [Measured(0.7, 4)])
        best.add(Measured(0.8, 6))
        for step in (6, 8, 10):
            checkpoints.save(step, state)
    assert on_disk(tmp_path) == {4, 8, 10}
    assert "moved to damaged-6" in capsys.readouterr().err


def test_without_keep_best_nothing_is_written(tmp_path):
    best = BestCheckpoints(tmp_path, None, Saved(1), Cluster())
    best.begin([Measured(0.1, 1)])
    assert not best.add(Measured(0.0, 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file; the run keeps no best checkpoint"),
        ("[]", "is not a list of steps and losses; name a step"),
        ('{"best": [{"loss": 1}]}', "is not a list of steps and losses"),
        ("{", "is not valid JSON"),
        ('{"best": []}', "names no checkpoint that is complete; name a step"),
        ('{"best": [{"step": 9, "loss": 1}]}', "names no checkpoint that is complete"),
    ],
)
def test_a_missing_best_checkpoint_is_one_line(tmp_path, content, words):
    if content is not None:
        (tmp_path / BEST_NAME).write_text(content)
    with pytest.raises(InputError, match=words):
        best_step(tmp_path, np.array([3]).tolist())


@pytest.mark.parametrize("text", ["-1", "1.5", "newest", "", "٣", "9" * 5000])
def test_a_step_is_a_number_or_best(text, capsys):
    parser = argparse.ArgumentParser()
    add_run_flags(parser.add_argument)
    given = [parser.parse_args(["--step", right]).step for right in ("12", "best")]
    assert given == [12, "best"]
    with pytest.raises(SystemExit):
        parser.parse_args([f"--step={text}"])
    assert "is not a step such as 500, nor best" in capsys.readouterr().err
