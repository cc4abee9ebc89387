"""Which processes a process takes for lost or failed; the test sets the clock."""

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import pytest

from alload_jax.distributed import cluster as cluster_module
from alload_jax.distributed.cluster import Heartbeat, Message, parse_message
from alload_jax.distributed.coordination import ProcessInfo
from alload_jax.errors import InputError, LostConnectionError
from alload_jax.processes import has_ended, process_name

LOST_AFTER = 30.0
INTERVAL = 2.0


class FakeStore:
    """The key-value store in process 0; while it is silent, every access fails."""

    def __init__(self):
        self.silent, self.texts = False, {}

    def put(self, key, text):
        if self.silent:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        self.texts[key.split("/")[1]] = text

    def get_prefix(self, prefix):
        assert prefix == "heartbeat"
        return dict(self.texts)


class FakeCluster:
    """One real heartbeat; the test writes the messages of the other processes and the clock.

    Attributes:
      now: time of the clock in seconds.
      others: the newest message of each other process.
      silent: other processes that send no messages any more.
      found: the failures that the heartbeat sees as time passes, if it is a list.
    """

    def __init__(self, monkeypatch, process_id=1, num_processes=3):
        self.now, self.store, self.silent, self.found = 1000.0, FakeStore(), set(), None
        self.others = {
            n: {"host": f"h{n}", "sequence": 0} for n in range(num_processes) if n != process_id
        }
        idle = SimpleNamespace(start=lambda: None, join=lambda *_: None)
        monkeypatch.setattr(cluster_module, "Thread", lambda **_: idle)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.advance)
        monkeypatch.setattr(cluster_module, "time", clock)
        process = ProcessInfo("h0:1", num_processes, process_id)
        self.heartbeat = Heartbeat(self.store, process, LOST_AFTER)

    def advance(self, seconds):
        """Lets time pass, in which all processes that are not silent send their messages."""
        end = self.now + seconds
        while self.now < end:
            self.now += min(INTERVAL, end - self.now)
            for number, message in self.others.items():
                if number not in self.silent:
                    message["sequence"] += 1
                    self.store.texts[str(number)] = json.dumps(message)
            self.heartbeat._exchange()
            if self.found is not None:
                self.found.append(self.heartbeat._find_failure())

    def failure(self, after=0.0):
        """What the heartbeat finds after some seconds."""
        self.advance(after)
        return self.heartbeat._find_failure()

    def own(self):
        """The message that this process has sent last."""
        return parse_message(self.store.texts["1"])

    def seconds_of(self, function, *arguments):
        began = self.now
        function(*arguments)
        return self.now - began


@pytest.fixture
def cluster(monkeypatch):
    return FakeCluster(monkeypatch)


def test_a_process_is_lost_after_lost_after_seconds_of_silence(cluster):
    assert cluster.failure(10 * LOST_AFTER) == ""
    cluster.silent.add(2)
    assert cluster.failure(LOST_AFTER) == ""
    assert cluster.failure(INTERVAL) == "process 2 of 3 (h2) was lost before the first step"
    cluster.heartbeat.step = 7
    assert cluster.failure() == "process 2 of 3 (h2) was lost at step 7"


@pytest.mark.parametrize("waited_for", [False, True])
def test_a_process_of_this_host_that_has_ended_is_lost_at_once(cluster, waited_for):
    names = "from alload_jax.processes import process_name; print(process_name(), flush=True)"
    command = [sys.executable, "-c", f"{names}; input()"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        name = cluster.others[2]["process"] = process.stdout.readline().strip()
        assert cluster.failure(10 * LOST_AFTER) == ""
        process.kill()
        if waited_for:
            process.wait()
        else:  # a zombie
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        cluster.silent.add(2)
        assert cluster.failure() == ""  # its last message may still come
        assert cluster.failure(2 * INTERVAL) == ""
        assert cluster.failure(0.1) == "process 2 of 3 (h2) was lost before the first step"
    boot, space, number, start = name.split()
    for another in (f"x{boot} {space}", f"{boot} x{space}"):  # host, or container
        assert not has_ended(f"{another} {number} {start}", process_name())
    assert not has_ended("", process_name())
    own, now = process_name().rsplit(" ", 1)
    assert has_ended(f"{own} {int(now) + 1}", process_name())  # its number was given again


@pytest.mark.parametrize("state", ["failed", "exited"])  # the watchdog leaves at the former
def test_a_process_of_this_host_that_tells_why_it_ends_is_not_lost(cluster, state):
    own, start = process_name().rsplit(" ", 1)
    cluster.others[2] |= {"process": f"{own} {int(start) + 1}"}
    assert cluster.failure(INTERVAL) == ""
    cluster.others[2] |= {"state": state, "reason": "disk full"}
    cluster.advance(INTERVAL)
    cluster.silent.add(2)
    assert cluster.failure(2 * INTERVAL) == ""
    assert cluster.failure(INTERVAL).endswith("ended before the first step: disk full")


def test_a_process_that_has_ended_is_not_lost_while_process_0_may_know_why(cluster):
    own, start = process_name().rsplit(" ", 1)
    cluster.others[2] |= {"process": f"{own} {int(start) + 1}"}
    assert cluster.failure(INTERVAL) == ""
    cluster.store.silent = True
    assert cluster.failure(LOST_AFTER / 2) == ""
    cluster.others[2] |= {"state": "exited", "reason": "disk full"}
    cluster.store.silent = False
    assert cluster.failure(INTERVAL) == ""
    assert cluster.failure(LOST_AFTER).endswith("ended before the first step: disk full")


def test_a_process_whose_proc_is_of_another_namespace_has_no_name(monkeypatch):
    """As after `unshare --pid`, where /proc shows other processes under these numbers."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert process_name() == ""


def test_a_process_that_never_sent_a_message_is_lost_too(cluster):
    cluster.silent.add(2)
    assert "process 2 of 3 (host unknown) was lost" in cluster.failure(2 * LOST_AFTER)


def test_while_process_0_is_silent_no_other_process_counts_as_lost(cluster):
    cluster.advance(LOST_AFTER)
    cluster.store.silent = True
    cluster.advance(LOST_AFTER - INTERVAL)
    cluster.store.silent = False
    assert cluster.failure(INTERVAL) == ""  # a short pause ends no process
    cluster.silent.add(2)
    cluster.advance(INTERVAL)
    cluster.store.silent = True
    assert cluster.failure(LOST_AFTER) == ""
    assert cluster.failure(INTERVAL) == "process 0 of 3 (h0) was lost before the first step"


@pytest.mark.parametrize(("state", "silent"), [("failed", False), ("exited", True)])
def test_the_failure_of_another_process_is_reported_after_a_grace_period(cluster, state, silent):
    cluster.others[2] |= {"state": "unconfirmed"}
    assert cluster.failure(LOST_AFTER) == ""
    cluster.others[2] |= {"state": state, "reason": "data: no such folder"}
    assert cluster.failure(INTERVAL) == ""
    if silent:  # a process that exited is not lost
        cluster.silent.add(2)
    assert cluster.failure(5.0) == ""
    expected = "process 2 of 3 (h2) ended before the first step: data: no such folder"
    assert cluster.failure(0.1) == cluster.failure(2 * LOST_AFTER) == expected


def test_a_process_that_failed_does_not_report_others(cluster):
    assert cluster.seconds_of(cluster.heartbeat.report_failure, InputError("data: none")) == 0
    assert cluster.heartbeat._message.state == "failed"
    cluster.others[2] |= {"state": "failed", "reason": "the same"}
    assert cluster.failure(LOST_AFTER) == ""
    assert cluster.own().reason == "data: none"


@pytest.mark.parametrize("kind", [RuntimeError, LostConnectionError])
def test_an_error_that_a_loss_may_have_caused_is_confirmed_after_a_wait(cluster, kind):
    seconds = cluster.seconds_of(cluster.heartbeat.report_failure, kind("connection reset"))
    assert seconds >= LOST_AFTER  # no other failed, so the error is this process's own
    assert cluster.heartbeat._message.state == "failed"


def test_an_error_that_all_processes_have_is_confirmed_at_once(cluster):
    cluster.others[0] |= {"state": "unconfirmed"}
    cluster.others[2] |= {"state": "failed", "reason": "RuntimeError: NaN"}
    cluster.advance(INTERVAL)
    assert cluster.seconds_of(cluster.heartbeat.report_failure, RuntimeError("NaN")) <= INTERVAL
    assert cluster.heartbeat._message.reason == "RuntimeError: NaN"


def test_an_error_caused_by_another_failure_reports_that_failure(cluster):
    cluster.advance(INTERVAL)
    cluster.heartbeat.step, cluster.found = 8, []
    cluster.others[2] |= {"state": "failed", "reason": "interrupted"}
    cluster.heartbeat.report_failure(RuntimeError("Gloo AllGather failed: connection reset"))
    assert "process 2 of 3 (h2) ended at step 8: interrupted" in cluster.found


def test_a_suspended_process_reports_only_itself(cluster):
    assert cluster.heartbeat._find_suspension(LOST_AFTER) == ""
    words = "process 1 of 3 (host unknown) was suspended for 90 seconds before the first step"
    assert cluster.heartbeat._find_suspension(90.0).startswith(words)


def test_a_process_that_another_ends_says_so_before_it_exits(cluster, monkeypatch, capsys):
    def end(status):
        raise SystemExit(status)

    def started_at_once(target, daemon):
        return SimpleNamespace(start=target, join=lambda seconds: None)

    monkeypatch.setattr(cluster_module, "Thread", started_at_once)
    monkeypatch.setattr(cluster_module.os, "_exit", end)
    cluster.others[0] |= {"state": "failed", "reason": "disk full"}
    cluster.advance(LOST_AFTER)
    cluster.heartbeat._interval = 0.01
    with pytest.raises(SystemExit, match="1"):
        cluster.heartbeat._check_loop()
    assert (cluster.own().state, "disk full" in cluster.own().reason) == ("exited", True)
    assert capsys.readouterr().err.startswith("error: process 0 of 3 (h0) ended")


def test_an_error_that_follows_once_the_cause_is_told_is_not_told_too(cluster):
    """As of a collective, while the process announces that it ends."""
    cluster.heartbeat._message.state = "exited"
    report = cluster.heartbeat.report_failure
    following = threading.Thread(target=report, args=[RuntimeError("reset")], daemon=True)
    following.start()
    following.join(0.1)
    assert following.is_alive()


def test_an_error_of_jax_s_service_ends_a_process_that_has_none_of_its_own(cluster, monkeypatch):
    noted = threading.Event()
    monkeypatch.setattr(cluster_module, "SERVICE_FAILED", noted)
    assert cluster.failure() == ""
    noted.set()
    assert cluster.failure().startswith("JAX's coordination service ended the run, as it does ")
    cluster.heartbeat.report_failure(InputError("data: no such folder"))
    assert cluster.failure() == ""


@pytest.mark.parametrize(("state", "waits"), [("running", True), ("exited", False)])
def test_process_0_keeps_the_store_until_other_hosts_know_of_a_loss(monkeypatch, state, waits):
    """They notice it later themselves, and would take process 0 for lost."""
    cluster, ends = FakeCluster(monkeypatch, process_id=0), []
    own, start = process_name().rsplit(" ", 1)
    cluster.others[1] |= {"process": f"{own} {int(start) + 1}"}
    cluster.others[2] |= {"state": state}
    cluster.failure(INTERVAL)
    assert cluster.failure(3 * INTERVAL).startswith("process 1 of 3 (h1) was lost")
    monkeypatch.setattr(cluster_module.os, "_exit", lambda _: ends.append(cluster.now))
    closed = iter([False, True])
    cluster.heartbeat._closed = SimpleNamespace(wait=lambda _: next(closed))
    seconds = cluster.seconds_of(cluster.heartbeat._check_loop)
    assert len(ends) == 1
    assert (seconds >= 2 * INTERVAL) == waits


def test_a_process_killed_while_it_waits_for_the_others_to_finish_is_missed(monkeypatch):
    """It has answered already; JAX's shutdown would wait for it, and fail of another reason."""
    events = []
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: events.append("shutdown"))
    run = cluster_module.Cluster()
    run.num_processes, run.heartbeat = 2, SimpleNamespace(close=lambda: events.append("close"))

    def wait_for(key):
        events.append(key)
        return "null"

    run.store = SimpleNamespace(put=lambda key, text: None, wait_for=wait_for)
    with run:
        pass
    answers = [f"all_gather/{call}/{process}" for call in (1, 2) for process in (0, 1)]
    assert events == [*answers, "close", "shutdown"]


def test_process_0_exits_last(monkeypatch):
    statuses = []
    monkeypatch.setattr(cluster_module.os, "_exit", statuses.append)
    own, start = process_name().rsplit(" ", 1)
    killed = {"process": f"{own} {int(start) + 1}"}
    for process, other, expected in (
        (0, {"state": "exited"}, 0),
        (0, {}, LOST_AFTER),
        (0, killed, 0),
        (1, {}, 0),
    ):
        cluster = FakeCluster(monkeypatch, process_id=process)
        cluster.others[2] |= {"state": "exited"}
        cluster.others[1 - process] |= other
        seconds = cluster.seconds_of(cluster.heartbeat.exit_process, 3)
        assert expected <= seconds <= expected + INTERVAL
    assert cluster.own().state == "exited"
    assert statuses == [3] * 4


MALFORMED = [
    *("", "[]", "null", "{", '{"host": 1}', '{"sequence": 3}', '{"host": "h", "sequence": "3"}'),
    *('{"host": "h2", "sequence": true}', '{"host": "h2", "state": "gone"}', "[" * 100_000),
    '{"host": "' + "x" * 20_000 + '"}',
]


def test_malformed_messages_and_those_of_unknown_processes_end_nothing(cluster):
    cluster.advance(LOST_AFTER)
    for text in MALFORMED:
        assert parse_message(text) is None
        cluster.store.texts |= {"2": text, "x": text, "99": text}
        cluster.heartbeat._exchange()
        assert cluster.failure(INTERVAL) == ""
    cluster.store.texts["3"] = json.dumps({"host": "h3", "state": "failed"})
    assert cluster.failure(LOST_AFTER) == ""
    longest = json.dumps({"host": "x" * (10_000 - len('{"host": ""}'))})
    assert parse_message(longest) is not None
    assert parse_message(longest.replace("x", "xx", 1)) is None
    # Fields of later versions are passed over.
    message = parse_message('{"host": "h2", "sequence": 3, "mood": {"good": 1}}')
    assert message == Message("h2", 3)


def test_an_old_message_that_is_repeated_proves_no_life(cluster):
    cluster.advance(LOST_AFTER)
    old = cluster.store.texts["2"]
    cluster.advance(INTERVAL)
    cluster.silent.add(2)
    newest = cluster.store.texts["2"]
    for number in range(int(2 * LOST_AFTER / INTERVAL)):
        cluster.store.texts["2"] = (old, newest)[number % 2]
        cluster.advance(INTERVAL)
    assert "process 2 of 3 (h2) was lost" in cluster.failure()


def test_the_processes_that_hold_this_one_up_are_named(cluster):
    cluster.heartbeat.step = 7
    cluster.others[0]["step"], cluster.others[2]["step"] = 7, 6
    cluster.advance(INTERVAL)
    assert cluster.heartbeat.held_up_by() == "process 2 of 3 (h2) is at step 6"
    cluster.others[2] |= {"step": 7, "waiting": "for its data"}
    cluster.advance(INTERVAL)
    words = "process 2 of 3 (h2) is at step 7, and waits for its data"
    assert cluster.heartbeat.held_up_by() == words
    cluster.heartbeat.waiting = "for its data"
    assert cluster.heartbeat.held_up_by() == ""
    cluster.others[2]["waiting"] = cluster.heartbeat.waiting = ""
    cluster.advance(INTERVAL)
    assert cluster.heartbeat.held_up_by() == ""


def test_a_process_that_gives_up_lets_one_that_holds_it_up_say_so_first(cluster):
    cluster.heartbeat.step = 7
    cluster.others[0]["step"], cluster.others[2]["step"] = 7, 6
    cluster.advance(INTERVAL)
    assert cluster.seconds_of(cluster.heartbeat.give_up, "no progress") > cluster_module._GRACE
    own = cluster.own()
    assert (own.state, own.reason, own.step) == ("failed", "no progress", 7)
    cluster.others[2]["step"] = 7
    cluster.advance(INTERVAL)
    assert cluster.seconds_of(cluster.heartbeat.give_up, "no progress") == 0


def test_a_process_that_gives_up_lets_one_that_has_just_failed_say_so(cluster):
    """As one that held this one up and ended: this one then waits for something else."""
    cluster.others[2] |= {"state": "failed", "reason": "no progress", "sequence": 1}
    cluster.store.texts["2"] = json.dumps(cluster.others[2])
    cluster.heartbeat.waiting, cluster.found = "for its data", []
    cluster.heartbeat.give_up("no progress here")
    assert cluster.found[-1] == "process 2 of 3 (h2) ended before the first step: no progress"
