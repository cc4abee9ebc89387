"""The barrier of a checkpoint's commit, with threads in place of processes."""

import threading

import pytest

from alload_jax.training import checkpoint_files


@pytest.fixture
def waited(monkeypatch):
    keys = []

    def wait(*, key, timeout_ms):
        keys.append((key, timeout_ms))

    monkeypatch.setattr(checkpoint_files.multihost, "get_barrier_sync_fn", lambda: wait)
    return keys


def in_thread(function):
    caught = []

    def run():
        try:
            function()
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught


def write_and_tell(barrier, failure):
    """As Orbax does it: the barrier stands where a thread passes whether it has failed or not."""
    try:
        if failure is not None:
            raise failure
    finally:
        barrier(key="told", timeout_ms=9)


def test_a_thread_that_has_failed_does_not_wait(waited):
    barrier, failure = checkpoint_files.commit_barrier(), OSError("no space left")
    assert in_thread(lambda: write_and_tell(barrier, failure)) == [failure]
    assert waited == []


def test_others_wait(waited):
    barrier = checkpoint_files.commit_barrier()
    assert in_thread(lambda: write_and_tell(barrier, None)) == []
    assert waited == [("told", 9)]


def test_the_main_thread_waits_while_it_handles_an_error(waited):
    """A run that is stopped by a signal or a failure still saves."""
    barrier = checkpoint_files.commit_barrier()
    with pytest.raises(OSError, match="stopped"):
        write_and_tell(barrier, OSError("stopped"))
    assert waited == [("told", 9)]
