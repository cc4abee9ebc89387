"""Connects this process to JAX's coordination service, which process 0 hosts, and to its store.

JAX aborts the process from C++, with a page of stack trace that Python cannot intercept, when the
connection to process 0 breaks, and when the service reports an error: a process is started twice,
or somebody else joins as one of the run's. With `jax_enable_recoverability` it aborts all the same
(tried with JAX 0.10.2). Its client takes a callback instead, but cannot call one of Python (true
up to JAX 0.12): an argument has no type in Python, and the C++ exception that follows,
std::bad_cast, ends the process. Python can set what C++ does with such an exception: here the
thread that has met it stops, and the others go on. The client answers no more, so the process must
end soon: `Heartbeat` tells the loss of process 0, as of a process that is silent.

The service takes values for its key-value store from whoever reaches its port. Process 0 therefore
writes a new secret to the run folder, which all processes share and strangers cannot read, and
every value carries a keyed hash (HMAC-SHA256, RFC 2104) of its key and text.

This module uses private parts of JAX: `jax.distributed` detects the launcher but has no public way
to ask what it found, takes no callback, and starts a store that it gives no access to.
"""

import atexit
import ctypes
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import jax
from jax._src import clusters, distributed
from jax._src.lib import _jax, utils

from alload_jax.errors import InputError, print_stderr, reason_of
from alload_jax.files import replacing
from alload_jax.processes import FOR_OTHERS, waits


def host_and_port(address: str) -> tuple[str, int]:
    """Splits `host:port`; an IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


_PROBES, _PROBE_SECONDS = 3, 1.0
"""Attempts to connect to process 0 that decide whether it still listens; seconds between them."""


def takes_connections(address: str) -> bool | None:
    """Whether process 0 takes a connection to its host:port, or refuses it; None for neither."""
    try:
        socket.create_connection(host_and_port(address), timeout=_PROBE_SECONDS).close()
        return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


def still_listens(address: str) -> bool:
    """Whether process 0, whose connection has failed, goes on to take others.

    One that it takes is no proof that it lives: a process that ends may close its connections
    before the port on which it listens.
    """
    taken = others = 0
    while taken < _PROBES and others < _PROBES:
        is_taken = takes_connections(address) is True
        taken, others = taken + is_taken, others + (not is_taken)
        time.sleep(_PROBE_SECONDS)
    return taken == _PROBES


SERVICE_FAILED = Event()
"""Set when the coordination service has failed for this process, and process 0 still listens."""
SERVICE_ENDED_IT = (
    "JAX's coordination service ended the run, as it does when a process is started twice, "
    "somebody else joins as one of them or a connection breaks (docs/many-gpus.md, Ports)"
)
_PATIENCE = 20.0
"""Seconds in which the heartbeat ends the process with better advice than this module has."""
_FATAL = 3
_FUNCTION = ctypes.CFUNCTYPE(None)
_kept: list[Callable[[], None]] = []
"""The handler that C++ calls, and the one before it; both must outlive all threads."""


@contextmanager
def errors_noted(address: str) -> Iterator[None]:
    """Errors of a client that is created in it do not abort the process.

    `SERVICE_FAILED` is set unless process 0, at this host:port, has ended. Where C++ has another
    library than GNU's, errors abort the process as ever.
    """
    create = _jax.get_distributed_runtime_client
    if _set_handler(address):
        note = partial(create, missed_heartbeat_callback=lambda _: None)
        _jax.get_distributed_runtime_client = note
        if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # JAX's own choice
            utils.absl_set_min_log_level(_FATAL)  # the service logs each error in several lines
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = create


def _set_handler(address: str) -> bool:
    """Sets what happens to C++ exceptions that nobody catches; returns whether it can."""
    if _kept:
        return True
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        set_handler = library._ZSt13set_terminatePFvvE
        exception_type = library.__cxa_current_exception_type
    except (OSError, AttributeError):
        return False
    set_handler.restype = exception_type.restype = ctypes.c_void_p

    def handle() -> None:
        found = exception_type()
        # A std::type_info: the address of its table, and that of its name.
        if found and ctypes.c_char_p.from_address(found + 8).value == b"St8bad_cast":
            if not still_listens(address):
                Event().wait()
            SERVICE_FAILED.set()
            time.sleep(_PATIENCE)
            print_stderr(f"error: {SERVICE_ENDED_IT}; start all again")
            os._exit(1)
        _kept[1]()

    _kept.append(_FUNCTION(handle))
    _kept.append(_FUNCTION(set_handler(_kept[0])))
    atexit.register(set_handler, _kept[1])  # no Python can be called after its end
    return True


CONNECT_SECONDS = 300
"""How long the processes wait for each other at the start."""
_EXTRA_SECONDS = 60
"""How much longer JAX waits: its time-out aborts the process from C++, so ours must come first."""


class ProcessInfo(NamedTuple):
    """The identity of a process in a run of several; the arguments of `jax.distributed.initialize`.

    Attributes:
      coordinator_address: host:port on which process 0 listens.
      num_processes: number of processes of the run.
      process_id: number of this process, from 0.
      local_device_ids: the host's devices that this process uses; None for all visible ones.
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None


def process_info_from_launcher() -> ProcessInfo | None:
    """What JAX finds in the environment of Slurm, Open MPI or Kubernetes; None if incomplete.

    Raises:
      RuntimeError: Kubernetes does not answer.
    """
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, CONNECT_SECONDS
    )
    if None in found[:3]:
        return None
    return ProcessInfo(*found)  # type: ignore[arg-type]


def connect(
    process: ProcessInfo,
    heartbeat_seconds: float,
    certificates: Path | None = None,
) -> None:
    """Starts or joins the coordination service; returns when all processes are connected.

    Args:
      process: this process.
      heartbeat_seconds: silence of one process after which JAX itself ends all processes.
      certificates: folder of the files of mutual TLS, if any.

    Raises:
      InputError: process 0 cannot listen on its port, or the certificates cannot be used.
      RuntimeError: the processes did not connect and JAX reported it instead of aborting.
    """
    if certificates:
        _use_certificates(certificates)
    address = process.coordinator_address
    if process.process_id == 0:
        try:
            socket.create_server(("", host_and_port(address)[1])).close()
        except OSError as error:
            raise InputError(
                f"cluster.coordinator is {address}, but process 0 cannot listen there "
                f"({error.strerror}); stop another process 0 that uses the port, or choose a port "
                "that is free and that all hosts can reach"
            ) from error
        if not is_loopback(address) and not certificates:  # JAX asks nobody who connects
            place = bind_address(address) or os.environ.get(_BIND_ADDRESS, "all interfaces")
            print_stderr(
                f"note: process 0 listens on {place}, where whoever connects can read the config "
                "and end the run; let only the hosts of the run reach it (docs/many-gpus.md)"
            )
    # The preemption service would install its own handler of SIGTERM in place of ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with errors_noted(address):
        jax.distributed.initialize(
            address,
            process.num_processes,
            process.process_id,
            process.local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=bind_address(address),
            initialization_timeout=CONNECT_SECONDS + _EXTRA_SECONDS,
            heartbeat_timeout_seconds=round(heartbeat_seconds),
            shutdown_timeout_seconds=60,
        )


_CERTIFICATES = {"cert_file": "cert.pem", "key_file": "key.pem", "ca_file": "ca.pem"}
_PEERS = "alload://run/"
"""What a name in the certificates of all processes begins with, on whichever hosts they are."""


def _use_certificates(folder: Path) -> None:
    """Lets JAX's coordination service and its clients ask each other for certificates."""
    if not hasattr(jax.config, "jax_mtls_ca_file"):
        raise InputError(
            f"cluster.certificates is {folder}, but JAX {jax.__version__} has no mutual TLS; "
            "install JAX 0.11.2 or later, or leave it out and keep strangers from the port"
        )
    for option, name in _CERTIFICATES.items():
        with open(folder / name, "rb"):  # JAX would say what is wrong in many lines
            jax.config.update(f"jax_mtls_{option}", str(folder / name))
    jax.config.update("jax_mtls_peer_uri_prefix", _PEERS)


def is_loopback(address: str) -> bool:
    """Whether only this host can mean that host:port, so that no other needs to reach it."""
    host, _ = host_and_port(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind_address(address: str) -> str | None:
    """Where process 0 listens: at the one address of this host that a host:port means.

    None for what JAX chooses: JAX_COORDINATOR_BIND_ADDRESS of the environment, or all interfaces.
    It is where the host has several addresses, none of them is this host's, or it is the loopback,
    as in the /etc/hosts of some systems, although others reach this host by that name.
    """
    if is_loopback(address):
        return address
    host, port = host_and_port(address)
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        (own,) = {ipaddress.ip_address(each) for each in found}
        family = socket.AF_INET if own.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((str(own), 0))
    except (OSError, ValueError):
        return None
    if own.is_loopback or own.is_unspecified or _BIND_ADDRESS in os.environ:
        return None
    return f"[{own}]:{port}" if own.version == 6 else f"{own}:{port}"


_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"


SECRET_NAME = "cluster.secret"
"""File of the secret in the run folder; only its owner can read it."""
LONGEST_TEXT = 1 << 22
"""Characters of the longest text that is sent or read."""
VISIBLE_SECONDS = 60
"""How long to wait for what another host has written: NFS caches folders."""
_BYTES = 32
_PROOF = 2 * hashlib.sha256().digest_size


class Seal:
    """Puts a proof before texts, and takes off those that are right."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def close(self, key: str, text: str) -> str:
        """Returns a text with its proof.

        Raises:
          ValueError: the text is longer than `LONGEST_TEXT`.
        """
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"{key}: {len(text)} characters; at most {LONGEST_TEXT} can be sent")
        return self._proof(key, text) + text

    def open(self, key: str, sealed: str) -> str | None:
        """Returns the text; None if it is too long, or not of a process that has the secret."""
        if not _PROOF <= len(sealed) <= _PROOF + LONGEST_TEXT:
            return None
        proof, text = sealed[:_PROOF], sealed[_PROOF:]
        right = hmac.compare_digest(proof.encode(), self._proof(key, text).encode())
        return text if right else None

    def _proof(self, key: str, text: str) -> str:
        message = f"{key}\0{text}".encode(errors="surrogatepass")
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def create_secret(folder: Path) -> bytes:
    """Writes a new secret to a folder, which is created if necessary.

    Raises:
      OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_bytes(_BYTES)
    with replacing(folder / SECRET_NAME, mode=0o600) as unfinished:
        unfinished.write_bytes(secret)
    return secret


def read_secret(folder: Path, digest: str, seconds: float = VISIBLE_SECONDS) -> bytes:
    """Reads the secret that process 0 has written; waits until it is visible.

    Args:
      folder: the run folder.
      digest: `digest_of` the secret, which tells it from that of an earlier start.
      seconds: how long to wait.

    Raises:
      InputError: the folder does not show it in time.
    """
    end, reason = time.monotonic() + seconds, "it is not there"
    while True:
        try:
            secret = (folder / SECRET_NAME).read_bytes()
            if digest_of(secret) == digest:
                return secret
            reason = "it is of another start"
        except OSError as error:
            reason = error.strerror or reason
        if time.monotonic() > end:
            raise InputError(
                f"run.folder is {folder}: {SECRET_NAME} that process 0 writes there cannot be read "
                f"({reason}); start all processes with the same config as the same user, and give "
                "all hosts one file system, mounted at the same path"
            )
        time.sleep(0.1)


def digest_of(secret: bytes) -> str:
    """What may be told of a secret."""
    return hashlib.sha256(secret).hexdigest()


_UNLIMITED = 30 * 24 * 3600 * 1000  # milliseconds; the heartbeat ends a wait that cannot succeed
_AGREE_SECONDS = 120
"""How long a process may take to read the secret."""
_READ_SECONDS = 3.0
"""Time for the others to read a reason before process 0, which hosts the store, ends."""
_FORGED_SECONDS = 0.2
"""Time between two looks at a key that a stranger has written."""


class KeyValueStore:
    """Strings by key, written and read by any process. Computations do not delay access.

    Values without the run's proof are passed over, as if nobody had written them.
    """

    def __init__(self, seal: Seal, client: Any = None):
        """Uses the store that `connect` has started, or another client."""
        self._client: Any = client or distributed.global_state.client
        self._seal = seal

    def put(self, key: str, text: str) -> None:
        """Sets the value of a key; replaces an earlier one."""
        key = f"alload/{key}"
        self._client.key_value_set(key, self._seal.close(key, text), allow_overwrite=True)

    @waits(FOR_OTHERS)
    def wait_for(self, key: str) -> str:
        """Returns the value of a key; blocks until some process has set it."""
        key = f"alload/{key}"
        while True:
            sealed = self._client.blocking_key_value_get(key, _UNLIMITED)
            if (text := self._seal.open(key, sealed)) is not None:
                return text
            time.sleep(_FORGED_SECONDS)

    def get_prefix(self, prefix: str) -> dict[str, str]:
        """Returns all values whose keys begin with `prefix/`, by the last part of the key."""
        found = self._client.key_value_dir_get(f"alload/{prefix}/")
        opened = {key: self._seal.open(key, sealed) for key, sealed in found}
        return {key.rpartition("/")[2]: text for key, text in opened.items() if text is not None}


def agree_on_seal(process: int, processes: int, folder: Path, client: Any = None) -> Seal:
    """Process 0 writes a new secret to the run folder, the others read it. A collective operation.

    Args:
      process: number of this process.
      processes: number of all.
      folder: the run folder.
      client: of the store; None for JAX's.

    Raises:
      InputError: a process cannot write or read the secret; all raise the same.
    """
    client = client or distributed.global_state.client
    secret, said = b"", ""
    try:
        if process == 0:
            secret = create_secret(folder)
            client.key_value_set("secret/digest", digest_of(secret))
        elif digest := _read(client, "secret/digest"):
            secret = read_secret(folder, digest)
    except (InputError, OSError) as error:
        said = f"process {process} of {processes}: {reason_of(error)}"
        if process == 0:
            client.key_value_set("secret/digest", "")
    client.key_value_set(f"secret/{process}", f"={said}")
    answers = [_read(client, f"secret/{n}")[1:] for n in range(processes)]
    if problem := next(filter(None, answers), ""):
        if process == 0:
            time.sleep(_READ_SECONDS)
        raise InputError(problem)
    return Seal(secret)


def _read(client: Any, key: str) -> str:
    """A value that has no proof yet.

    Raises:
      InputError: nobody writes it in time.
    """
    try:
        return client.blocking_key_value_get(key, 1000 * _AGREE_SECONDS)[:LONGEST_TEXT]
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"the processes lost each other at the start (no {key} within {_AGREE_SECONDS} "
            "seconds); start all processes again"
        ) from error
