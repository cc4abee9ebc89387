"""Whom a process takes for lost or failed, by a clock that the test turns."""

import json
from types import SimpleNamespace

import jax
import pytest

from alload_jax.distributed import heartbeat as heartbeat_module
from alload_jax.distributed.coordination import Member
from alload_jax.distributed.heartbeat import Heartbeat
from alload_jax.errors import InputError

LOST_AFTER = 30.0
INTERVAL = 2.0


class KeyValueStore:
    """Process 0's store; without an answer while it is silent."""

    def __init__(self):
        self.silent, self.texts = False, {}

    def put(self, name, text):
        if self.silent:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        self.texts[name.split("/")[1]] = text

    def under(self, folder):
        assert folder == "beat"
        return dict(self.texts)


class Cluster:
    """One heartbeat among processes whose beats the test writes, in step with its clock."""

    def __init__(self, monkeypatch, process=1, processes=3):
        self.now, self.board = 1000.0, KeyValueStore()
        self.others = {n: {"host": f"h{n}", "count": 0} for n in range(processes) if n != process}
        self.quiet, self.monkeypatch = set(), monkeypatch
        idle = SimpleNamespace(start=lambda: None, join=lambda: None)
        monkeypatch.setattr(heartbeat_module, "Thread", lambda **_: idle)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.after)
        monkeypatch.setattr(heartbeat_module, "time", clock)
        self.heartbeat = Heartbeat(self.board, Member("h0:1", processes, process), LOST_AFTER)

    def after(self, seconds):
        """Some seconds later; everybody who is not quiet has gone on beating."""
        end = self.now + seconds
        while self.now < end:
            self.now += min(INTERVAL, end - self.now)
            for number, beat in self.others.items():
                if number not in self.quiet:
                    beat["count"] += 1
                    self.board.texts[str(number)] = json.dumps(beat)
            self.heartbeat._beat()

    def verdict(self, seconds=0.0):
        self.after(seconds)
        return self.heartbeat._verdict()


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(monkeypatch)


def test_whoever_beats_is_well(cluster):
    assert cluster.verdict(10 * LOST_AFTER) == ""


def test_silence_is_a_loss_only_after_so_long(cluster):
    cluster.after(LOST_AFTER)
    cluster.quiet.add(2)
    assert cluster.verdict(LOST_AFTER - INTERVAL) == ""
    assert cluster.verdict(2 * INTERVAL) == "process 2 of 3 (h2) was lost before the first step"
    cluster.heartbeat.step = 7
    assert cluster.verdict() == "process 2 of 3 (h2) was lost at step 7"


def test_a_process_that_never_came_is_lost_too(cluster):
    cluster.quiet.add(2)
    assert "process 2 of 3 (host unknown) was lost" in cluster.verdict(2 * LOST_AFTER)


def test_while_process_0_keeps_silent_nobody_else_is_blamed(cluster):
    cluster.after(LOST_AFTER)
    cluster.board.silent = True
    assert cluster.verdict(LOST_AFTER) == ""
    assert cluster.verdict(INTERVAL) == "process 0 of 3 (h0) was lost before the first step"


def test_a_pause_of_process_0_costs_nobody_its_life(cluster):
    cluster.after(LOST_AFTER)
    cluster.board.silent = True
    cluster.after(LOST_AFTER - INTERVAL)
    cluster.board.silent = False
    assert cluster.verdict(INTERVAL) == ""


def test_another_s_failure_is_told_once_it_can_have_said_so_itself(cluster):
    cluster.others[2] |= {"state": "failed", "reason": "data: no such folder"}
    assert cluster.verdict(INTERVAL) == ""
    assert cluster.verdict(6.0) == (
        "process 2 of 3 (h2) ended before the first step: data: no such folder"
    )


def test_one_that_is_hurt_is_not_failed_yet(cluster):
    cluster.others[2] |= {"state": "hurt"}
    assert cluster.verdict(LOST_AFTER) == ""


def test_one_that_left_is_not_lost_and_its_failure_is_told(cluster):
    cluster.others[2] |= {"state": "gone", "reason": "out of memory"}
    cluster.after(INTERVAL)
    cluster.quiet.add(2)
    assert cluster.verdict(2 * LOST_AFTER) == (
        "process 2 of 3 (h2) ended before the first step: out of memory"
    )


def test_who_has_failed_itself_says_nothing_of_others(cluster):
    cluster.heartbeat.fail(InputError("data: no such folder"))
    assert json.loads(cluster.board.texts.get("1", "{}")).get("state") != "hurt"
    cluster.others[2] |= {"state": "failed", "reason": "the same"}
    assert cluster.verdict(LOST_AFTER) == ""
    assert json.loads(cluster.board.texts["1"])["reason"] == "data: no such folder"


def test_an_error_that_a_loss_may_have_caused_waits_for_the_others_word(cluster):
    begin = cluster.now
    cluster.heartbeat.fail(RuntimeError("connection reset"))
    assert cluster.now - begin >= LOST_AFTER  # nobody failed: the error is one's own
    assert cluster.heartbeat._own.state == "failed"


def test_an_error_that_all_have_is_everyone_s_own(cluster):
    for beat in cluster.others.values():
        beat["state"] = "hurt"
    cluster.after(INTERVAL)
    begin = cluster.now
    cluster.heartbeat.fail(RuntimeError("NaN"))
    assert cluster.now - begin <= INTERVAL
    assert cluster.heartbeat._own.reason == "RuntimeError: NaN"


def test_a_loss_that_hurts_is_told_in_the_words_of_who_failed(cluster):
    cluster.after(INTERVAL)
    told = []

    def judged(seconds):
        cluster.after(seconds)
        told.append(cluster.heartbeat._verdict())

    cluster.heartbeat.step = 8
    cluster.others[2] |= {"state": "failed", "reason": "interrupted"}
    cluster.monkeypatch.setattr(heartbeat_module.time, "sleep", judged)
    cluster.heartbeat.fail(RuntimeError("Gloo AllGather failed: connection reset"))
    assert "process 2 of 3 (h2) ended at step 8: interrupted" in told


def test_one_that_stood_still_blames_nobody(cluster):
    assert cluster.heartbeat._stopped(LOST_AFTER - 1) == ""
    words = "process 1 of 3 (host unknown) stood still for 90 seconds before the first step"
    assert cluster.heartbeat._stopped(90.0).startswith(words)


def test_a_beat_of_a_process_too_many_is_not_counted(cluster):
    cluster.board.texts["3"] = json.dumps({"host": "h3"})
    assert cluster.verdict(LOST_AFTER) == ""


def test_process_0_leaves_last(monkeypatch):
    cluster = Cluster(monkeypatch, process=0)
    left = []
    monkeypatch.setattr(heartbeat_module.os, "_exit", left.append)
    begin = cluster.now
    for beat in cluster.others.values():
        beat["state"] = "gone"
    cluster.heartbeat.leave(3)
    assert left == [3]
    assert cluster.now - begin <= INTERVAL
