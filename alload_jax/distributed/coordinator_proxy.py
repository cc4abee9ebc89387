"""Between JAX's client and process 0, so that the loss of process 0 can be told in plain words.

JAX aborts a process from C++, with a page of stack trace and no way to intervene, in the instant
in which its connection to process 0 breaks. Behind a relay the connection does not break: it falls
silent, which the watch (`watch.py`) notices and explains.
"""

import socket
from threading import Thread


def host_and_port(address: str) -> tuple[str, int]:
    """Of `host:port`; an IPv6 host may stand in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class CoordinatorProxy:
    """Passes on what comes to a port of this host.

    Attributes:
      address: host:port, to be used instead of the target's.
    """

    def __init__(self, target: str):
        """Begins to serve for as long as the process lives; `target` is host:port."""
        self._target = host_and_port(target)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        _start(self._serve)

    def _serve(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection(self._target)
            except OSError:  # not there yet: JAX tries again
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(_pass_on, near, far)
            _start(_pass_on_until_lost, far, near)


def _pass_on(near: socket.socket, far: socket.socket) -> None:
    """From JAX to process 0; what JAX closes is closed."""
    try:
        while data := near.recv(1 << 16):
            far.sendall(data)
        far.shutdown(socket.SHUT_RDWR)
        near.close()
    except OSError:
        return  # process 0 is lost, and the other direction silent


def _pass_on_until_lost(far: socket.socket, near: socket.socket) -> None:
    """From process 0 to JAX, whose side stays open at the end."""
    try:
        while data := far.recv(1 << 16):
            near.sendall(data)
    except OSError:
        return


def _start(function: object, *arguments: object) -> None:
    Thread(target=function, args=arguments, daemon=True).start()  # type: ignore[arg-type]
