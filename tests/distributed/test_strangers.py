"""What somebody who speaks the protocol of JAX's coordination service can do to a run of others."""

import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import pytest
from patience import free_port

from alload_jax.distributed.coordination import ProcessInfo, connect
from alload_jax.errors import InputError

MEMBER = """
import sys
from alload_jax.distributed.initialize import ClusterConfig, initialize

coordinator, process, folder, *certificates = sys.argv[1:]
config = ClusterConfig(coordinator, 2, int(process), True, 300.0, *certificates)
with initialize(config, folder) as cluster:
    cluster.all_gather(None)
    print("together", flush=True)
    sys.stdin.read()
    cluster.all_gather(None)
"""
HAS_TLS = hasattr(jax.config, "jax_mtls_ca_file")
NO_NAMESPACES = os.geteuid() != 0 or shutil.which("ip") is None


def call(address, method, message, tls=None):
    """Calls a method of the service in HTTP/2; returns all that it answers."""
    names = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/xla.coordination.CoordinationService/{method}",
        ":authority": "run",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    fields = [[bytes([len(text)]) + text.encode() for text in pair] for pair in names.items()]
    header = b"".join(b"\0" + name + value for name, value in fields)
    body = b"\0" + struct.pack(">I", len(message)) + message
    host, port = address.rsplit(":", 1)
    connection, answer = socket.create_connection((host, int(port))), b""
    try:
        if tls:
            connection = tls.wrap_socket(connection)
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        connection.sendall(frame(1, 4, 1, header) + frame(0, 1, 1, body))
        reader = connection.makefile("rb")
        while head := reader.read(9):
            answer += reader.read(int.from_bytes(head[:3], "big"))
            if head[3] in (0, 1) and head[4] & 1:
                break
    except (ConnectionError, ssl.SSLError):
        pass  # as by a server that expects TLS, or a certificate
    finally:
        connection.close()
    return answer


def frame(kind, flags, stream, body):
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def text(number, value):
    """A field of a message, as protocol buffers write it."""
    return bytes([8 * number + 2, len(value)]) + value


def of_this_start(address, tls=None):
    """The field that says which start of the service is meant: the service tells everybody."""
    found = re.search(rb"currently (\d+)", call(address, "GetKeyValueDir", b"", tls))
    return text(1, b"\x19" + struct.pack("<Q", int(found[1]))) if found else b""


def read(address, tls=None):
    """What the processes say of themselves."""
    message = of_this_start(address, tls) + text(2, b"alload/heartbeat")
    return call(address, "GetKeyValueDir", message, tls)


def join(address, tls=None):
    """Registers as process 1."""
    return call(address, "RegisterTask", b"\x19" + 8 * b"\1" + b"\x28\1", tls)


def report(address, tls=None):
    """Reports an error of process 1."""
    message = of_this_start(address, tls) + b"\x10\1\x18\x0d" + text(4, b"a lie")
    return call(address, "ReportErrorToService", message, tls)


def tls_with(folder=None):
    """TLS with a folder's certificate, or without one."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if folder:
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@contextmanager
def run_of_two(coordinator, *arguments, hosts=((), ())):
    """Two processes that have met, and wait until their standard input ends."""
    with ExitStack() as ends:
        both = []
        for process, within in enumerate(hosts):
            command = [*within, sys.executable, "-c", MEMBER, coordinator, str(process)]
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            started = subprocess.Popen([*command, *map(str, arguments)], text=True, **pipes)
            ends.callback(started.kill)
            both.append(started)
        first = both[0].stdout.readline()
        assert first == "together\n", both[0].stderr.read()
        yield both


def assert_ended_by_the_service(processes):
    for process in processes:
        _, said = process.communicate()
        lines = [line for line in said.splitlines() if not line.startswith("note: ")]
        assert (process.returncode, len(lines)) == (1, 1), said
        assert lines[0].startswith("error: JAX's coordination service ended the run, as it does")
        assert lines[0].endswith("before the first step; start all processes again")


def assert_goes_on(processes):
    for process in processes:
        process.stdin.close()
    ends = [process.stderr.read() for process in processes if process.wait() is not None]
    assert [process.returncode for process in processes] == [0, 0], ends


@pytest.fixture
def coordinator():
    return f"localhost:{free_port()}"


@pytest.fixture(scope="session")
def new_certificates(tmp_path_factory):
    """Makes a folder of certificates as docs/many-gpus.md says."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    guide = (Path(__file__).parents[2] / "docs" / "many-gpus.md").read_text()
    (commands,) = re.findall(r"```\n(openssl .*?)```", guide, re.DOTALL)

    def new():
        folder = tmp_path_factory.mktemp("certificates")
        subprocess.run(["bash", "-ec", commands], cwd=folder, check=True, capture_output=True)
        return folder

    return new


needs_tls = pytest.mark.skipif(not HAS_TLS, reason="JAX has no mutual TLS before 0.11.2")


less_than_hosts = pytest.mark.skipif(not NO_NAMESPACES, reason="the test with hosts shows more")


@pytest.mark.slow
@pytest.mark.parametrize(
    "act", [pytest.param(join, marks=less_than_hosts), pytest.param(report, marks=needs_tls)]
)
def test_a_stranger_who_joins_or_reports_an_error_ends_every_process_in_one_line(
    act, tmp_path, coordinator
):
    with run_of_two(coordinator, tmp_path) as both:
        assert b'"state": "running"' in read(coordinator)
        assert b"has likely restarted" in act(coordinator) or act is report
        assert_ended_by_the_service(both)


@pytest.mark.slow
@needs_tls
def test_without_a_certificate_nobody_reads_joins_or_ends_a_run(
    tmp_path, coordinator, new_certificates
):
    certificates = new_certificates()
    with run_of_two(coordinator, tmp_path, certificates) as both:
        for tls in (None, tls_with(), tls_with(new_certificates())):
            for act in (read, join, report):
                assert act(coordinator, tls) == b""
        assert b'"state": "running"' in read(coordinator, tls_with(certificates))
        assert_goes_on(both)
    (secret,) = tmp_path.iterdir()  # messages are signed as well
    assert (secret.name, secret.stat().st_mode & 0o077) == ("cluster.secret", 0)


@pytest.mark.skipif(HAS_TLS, reason="JAX has mutual TLS")
def test_certificates_are_refused_where_jax_has_no_use_for_them(tmp_path):
    with pytest.raises(InputError, match=r"has no mutual TLS; install JAX 0\.11\.2 or later"):
        connect(ProcessInfo("localhost:9", 2, 1), 100.0, certificates=tmp_path)


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def at(host):
    return ("ip", "netns", "exec", host)


@pytest.fixture
def hosts():
    """Names of two hosts, 10.0.1.1 and 10.0.1.2, and of a stranger's, which sees 10.0.2.1."""
    names = [f"alload{os.getpid()}{letter}" for letter in "abs"]
    first, second, stranger = names
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for other, network in ((second, "10.0.1"), (stranger, "10.0.2")):
            near, far = f"to{network[-1]}", "net"
            ip("-n", first, "link", "add", near, "type", "veth", "peer", far, "netns", other)
            for name, device, number in ((first, near, 1), (other, far, 2)):
                ip("-n", name, "address", "add", f"{network}.{number}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot make network namespaces: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


STRANGER = """
import sys
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/.."]
from test_strangers import join, read
try:
    print(read(sys.argv[2]) + join(sys.argv[2]))
except OSError as error:
    print(type(error).__name__)
"""


def stranger(host, address):
    """What somebody on a host gets who reads and then joins."""
    command = [*at(host), sys.executable, "-c", STRANGER, os.path.dirname(__file__), address]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


needs_hosts = pytest.mark.skipif(NO_NAMESPACES, reason="namespaces need root and iproute2")


@pytest.mark.slow
@needs_hosts
def test_strangers_find_no_port_or_with_a_route_to_it_end_the_run_as_the_start_says(
    tmp_path, hosts
):
    first, second, elsewhere = hosts
    with run_of_two("10.0.1.1:9876", tmp_path, hosts=(at(first), at(second))) as both:
        assert stranger(elsewhere, "10.0.2.1:9876") == "ConnectionRefusedError\n"
        assert both[0].stderr.readline().startswith("note: process 0 listens on 10.0.1.1:9876, ")
        ip("-n", elsewhere, "route", "add", "10.0.1.1", "via", "10.0.2.1")
        found = stranger(elsewhere, "10.0.1.1:9876")
        assert '"state": "running"' in found
        assert "has likely restarted" in found
        assert_ended_by_the_service(both)
