import socket
import time
from contextlib import closing
from threading import Event

import pytest

from alload_jax.distributed import coordinator_proxy
from alload_jax.distributed.coordinator_proxy import CoordinatorProxy


@pytest.fixture
def process_0(monkeypatch):
    """What listens in place of process 0, its end of a forwarded connection, and the event."""
    monkeypatch.setattr(coordinator_proxy, "_PROBE_SECONDS", 0.1)
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


@pytest.mark.parametrize("seconds_between", [0.0, 0.05, 0.15])
def test_a_process_that_ends_is_gone_whichever_of_its_sockets_closes_first(
    process_0, seconds_between
):
    server, connection, gone = process_0
    connection.close()
    time.sleep(seconds_between)  # a process that ends closes one descriptor after the other
    server.close()
    assert gone.wait(5)


def test_a_process_that_closes_a_connection_and_still_listens_is_not_gone(process_0):
    _, connection, gone = process_0
    connection.close()
    assert not gone.wait(1)
