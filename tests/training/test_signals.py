"""Which signals stop a run."""

import signal

import pytest

from alload_jax.training.signals import StopRequest


@pytest.fixture
def handlers():
    """Restores the handlers of this process after the test."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_next_one_is_left_to_the_handler_before(handlers, number):
    signal.signal(number, signal.default_int_handler)
    with StopRequest() as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop.number == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_a_background_job_still_ignores_ctrl_c_and_stops_on_sigterm(handlers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop
        signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
