"""A TCP proxy between JAX's client and process 0, so that losing process 0 gives a clear message.

When the connection to process 0 breaks, JAX aborts the process from C++ with a page of stack trace,
and Python cannot intervene. JAX therefore connects to this proxy, which keeps its connection to JAX
open when process 0 is lost. JAX sees only silence; `heartbeat.py` detects and reports the loss.
"""

import socket
import time
from threading import Event, Thread

_PROBES, _PROBE_SECONDS = 3, 1.0
"""Attempts to connect that process 0 refuses before it counts as gone, and seconds between them."""


def host_and_port(address: str) -> tuple[str, int]:
    """Splits `host:port`; an IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class CoordinatorProxy:
    """Forwards connections from a local port to another address.

    Attributes:
      address: host:port of the local port, to be used instead of the target's.
    """

    def __init__(self, target: str, gone: Event | None = None):
        """Serves until the process ends.

        Args:
          target: host:port.
          gone: set when the target has closed a connection and refuses new ones.
        """
        self._target = host_and_port(target)
        self._gone = Event() if gone is None else gone
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        _start_thread(self._serve)

    def _serve(self) -> None:
        while True:
            client, _ = self._server.accept()
            try:
                target = socket.create_connection(self._target)
            except OSError:  # process 0 does not listen yet; JAX tries again
                client.close()
                continue
            for end in (client, target):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start_thread(_forward_requests, client, target)
            _start_thread(self._forward_responses, target, client)

    def _forward_responses(self, target: socket.socket, client: socket.socket) -> None:
        """From process 0 to JAX; leaves JAX's connection open when process 0 closes its own."""
        try:
            while data := target.recv(1 << 16):
                client.sendall(data)
        except OSError:
            pass  # the connection is broken, which is no different from a closed one
        if self._has_ended():
            self._gone.set()

    def _has_ended(self) -> bool:
        """Whether process 0 refuses connections.

        One that it takes is no proof that it lives: a process that ends may close its connections
        before the port on which it listens.
        """
        refused = others = 0
        while refused < _PROBES and others < _PROBES:
            try:
                socket.create_connection(self._target, timeout=_PROBE_SECONDS).close()
            except ConnectionRefusedError:
                refused += 1
            except OSError:
                others += 1
            else:
                others += 1
            time.sleep(_PROBE_SECONDS)
        return refused == _PROBES


def _forward_requests(client: socket.socket, target: socket.socket) -> None:
    """From JAX to process 0; closes both connections when JAX closes its own."""
    try:
        while data := client.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
        client.close()
    except OSError:
        return  # process 0 is lost; JAX's connection stays open


def _start_thread(function: object, *arguments: object) -> None:
    Thread(target=function, args=arguments, daemon=True).start()  # type: ignore[arg-type]
