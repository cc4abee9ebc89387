import socket
import threading
from contextlib import closing
from threading import Event
from types import SimpleNamespace

import pytest
from patience import PATIENCE

from alload_jax.distributed import coordination
from alload_jax.distributed.coordination import CoordinatorProxy


@pytest.fixture
def process_0(monkeypatch):
    """What listens in place of process 0, its end of a forwarded connection, and the event."""
    monkeypatch.setattr(coordination, "_PROBE_SECONDS", PATIENCE)
    gone = Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = CoordinatorProxy(f"127.0.0.1:{server.getsockname()[1]}", gone)
        host, port = proxy.address.split(":")
        with closing(socket.create_connection((host, int(port)))) as jax_s:
            connection, _ = server.accept()
            jax_s.sendall(b"request")
            assert connection.recv(7) == b"request"
            connection.sendall(b"response")
            assert jax_s.recv(8) == b"response"
            yield server, connection, gone


@pytest.fixture
def after_probes(monkeypatch):
    """Gives what happens after so many probes, instead of a pause; and counts them."""
    probes = SimpleNamespace(count=0, then={}, earlier=set(threading.enumerate()))

    def sleep(_):
        if threading.current_thread() not in probes.earlier:  # not of another test
            probes.count += 1
            probes.then.get(probes.count, lambda: None)()

    monkeypatch.setattr(coordination, "time", SimpleNamespace(sleep=sleep))
    return probes


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_process_that_ends_is_gone_whichever_of_its_sockets_closes_first(
    after_probes, process_0, answered
):
    server, connection, gone = process_0
    # A process that ends closes one descriptor after the other.
    if answered:
        after_probes.then[answered] = server.close
    else:
        server.close()
    connection.close()
    assert gone.wait(PATIENCE)
    assert after_probes.count == answered + 3


def test_a_process_that_closes_a_connection_and_still_listens_is_not_gone(after_probes, process_0):
    _, connection, gone = process_0
    threads = set(threading.enumerate()) - after_probes.earlier
    (forwards,) = (each for each in threads if "_forward_responses" in each.name)
    connection.close()
    forwards.join(PATIENCE)
    assert after_probes.count == 3
    assert not gone.is_set()
