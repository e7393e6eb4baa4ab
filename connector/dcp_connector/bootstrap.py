"""The small HTTP server in the engine's scheduler process, and the client that reads another engine's.

    GET /query         what Mooncake routers expect: {"0": {"engine_id", "worker_addr": {tp: {pp: "tcp://host:port"}}}}
    GET /v1/topology   this engine's handshake (`handshake.Topology`), signed
    GET /readyz        200 when every rank is up and the engine's own /health answers 200: the pod's readiness probe
    GET /healthz       200 while this server lives

It runs in threads of its own, so that it answers while the engine computes. It keeps nothing per client.
"""

import errno
import http.client
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import urlsplit

from typing_extensions import override

from dcp_connector.errors import PeerError, Reason, StartupError
from dcp_connector.handshake import (
    MAX_TOPOLOGY_BYTES,
    SIGNATURE_HEADER,
    Topology,
    decode_topology,
    encode_topology,
    query_answer,
)
from dcp_connector.wire import is_signed, sign

logger = logging.getLogger(__name__)

#: Connections served at the same time; more are closed at once.
MAX_CONNECTIONS = 64
#: A connection is cut off after this, however its client spends the time, so that probes find a free one.
CLIENT_TIMEOUT_S = 5.0
#: Time for one request of a decode engine, from the connection to the last byte.
FETCH_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 2.0


class BootstrapServer:
    """Serves one engine's handshake on `port` of all interfaces until `close`.

    `api_port` is the engine's own HTTP port, asked for /health by /readyz. Raises StartupError when the port is taken.
    """

    def __init__(self, port: int, api_port: int, secret: bytes, *, serves_query: bool) -> None:
        self._secret = secret
        self._api_port = api_port
        self._serves_query = serves_query
        self._topology: Topology | None = None
        self._body = b""
        self._signature = ""
        try:
            self._server = _listen(port, self._respond)
        except OSError as error:
            raise StartupError(
                f"the connector's bootstrap server can't listen on port {port}: {error}; "
                "set kv_connector_extra_config.bootstrap_port to a free one"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="dcp-bootstrap", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on (useful when 0 was asked for)."""
        return self._server.server_address[1]

    def publish(self, topology: Topology) -> None:
        """Serve this topology from now on."""
        self._body = encode_topology(topology)
        self._signature = sign(self._secret, self._body)
        self._topology = topology

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _respond(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for one path."""
        topology = self._topology
        if path == "/healthz":
            return _text(200, "ok")
        if path == "/readyz":
            return self._readiness(topology)
        if path == "/query" and self._serves_query:
            return (503, *_json({})) if topology is None else (200, *_json(query_answer(topology)))
        if path == "/v1/topology":
            if topology is None:
                return _text(503, "the workers have not reported their KV pages yet")
            return 200, {"Content-Type": "application/json", SIGNATURE_HEADER: self._signature}, self._body
        return _text(404, "no such path; there are /query (on prefill), /v1/topology, /readyz and /healthz")

    def _readiness(self, topology: Topology | None) -> tuple[int, dict[str, str], bytes]:
        if topology is None:
            return _text(503, "the workers have not reported their KV pages yet")
        try:
            status, _, _ = _get("127.0.0.1", self._api_port, "/health", _HEALTH_TIMEOUT_S, 4096)
        except (OSError, http.client.HTTPException) as error:
            return _text(503, f"the engine's /health on port {self._api_port} doesn't answer: {error}")
        if status != 200:
            return _text(503, f"the engine's /health on port {self._api_port} answers {status}")
        return _text(200, "ready")


def fetch_topology(origin: str, secret: bytes, timeout_s: float = FETCH_TIMEOUT_S) -> Topology:
    """Return the topology behind "http://HOST:PORT".

    Raises PeerError: BOOTSTRAP_UNREACHABLE, BOOTSTRAP_GARBAGE (also for a wrong signature), INCOMPATIBLE (version).
    """
    parts = urlsplit(origin)
    try:
        status, headers, body = _get(
            parts.hostname or "", parts.port or 80, "/v1/topology", timeout_s, MAX_TOPOLOGY_BYTES
        )
    except OSError as error:
        raise PeerError(Reason.BOOTSTRAP_UNREACHABLE, f"{origin} doesn't answer: {error}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise PeerError(Reason.BOOTSTRAP_GARBAGE, f"{origin} doesn't speak HTTP: {error!r}") from error
    if status == 503:
        raise PeerError(Reason.BOOTSTRAP_UNREACHABLE, f"{origin} is not ready: {_excerpt(body)}")
    if status != 200:
        raise PeerError(Reason.BOOTSTRAP_GARBAGE, f"{origin}/v1/topology answers {status}: {_excerpt(body)}")
    if len(body) > MAX_TOPOLOGY_BYTES:
        raise PeerError(Reason.BOOTSTRAP_GARBAGE, f"{origin}/v1/topology is longer than {MAX_TOPOLOGY_BYTES} bytes")
    if not is_signed(secret, body, headers.get(SIGNATURE_HEADER.lower(), "")):
        raise PeerError(
            Reason.BOOTSTRAP_GARBAGE,
            f"{origin}/v1/topology is not signed with this engine's control secret: it is no prefill engine of this "
            "deployment, or the two roles hold different secrets",
        )
    return decode_topology(body)


def _get(host: str, port: int, path: str, timeout_s: float, limit: int) -> tuple[int, dict[str, str], bytes]:
    """GET without redirects. Returns status, headers in lower case, and at most `limit` + 1 bytes of the body."""
    deadline = time.monotonic() + timeout_s
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        timed = cast("socket.socket", _Timed(connection.sock, deadline))
        with http.client.HTTPResponse(timed, method="GET") as response:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, headers, response.read(limit + 1)
    finally:
        connection.close()


class _Timed(io.RawIOBase):
    """Reads a socket until a deadline (monotonic). A socket's own timeout begins anew with every byte that arrives."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__()
        self._sock = sock
        self._deadline = deadline

    def makefile(self, *_mode: str) -> io.BufferedReader:
        """What http.client asks a socket for."""
        return io.BufferedReader(self)

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any, /) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out before everything had arrived")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)


def _excerpt(body: bytes) -> str:
    return ascii(body[:120].decode("utf-8", "replace"))


def _text(status: int, words: str) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "text/plain; charset=utf-8"}, f"{words}\n".encode()


def _json(value: object) -> tuple[dict[str, str], bytes]:
    return {"Content-Type": "application/json"}, json.dumps(value).encode()


_Responder = Callable[[str], tuple[int, dict[str, str], bytes]]


class _Server(ThreadingHTTPServer):
    """A threading server with a bound on its threads."""

    daemon_threads = True
    # A restarted engine must get its port back at once; two live servers still can't share one.
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, port: int, respond: _Responder, family: socket.AddressFamily) -> None:
        self.address_family = family
        self.respond = respond
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(("", port), _Handler)

    @override
    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hangs up or talks nonsense is its own problem: no traceback in the engine's log.
        logger.debug("bootstrap: connection of %s ended early", client_address, exc_info=True)


def _listen(port: int, respond: _Responder) -> _Server:
    """Listen on all addresses of both families, or of IPv4 where the host has no IPv6. Raises OSError."""
    try:
        return _Server(port, respond, socket.AF_INET6)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENOPROTOOPT):
            raise
    return _Server(port, respond, socket.AF_INET)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD from the server's table."""

    protocol_version = "HTTP/1.1"
    server_version = "dcp-bootstrap"
    sys_version = ""

    @override
    def setup(self) -> None:
        super().setup()
        self._deadline = time.monotonic() + CLIENT_TIMEOUT_S
        self.rfile.close()
        self.rfile = _Timed(self.connection, self._deadline).makefile()

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer one request."""
        server = self.server
        assert isinstance(server, _Server)
        status, headers, body = server.respond(self.path.partition("?")[0])
        # Unlike reads, one write takes no longer than the timeout in all.
        self.connection.settimeout(max(0.1, self._deadline - time.monotonic()))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("bootstrap: %s", format % args)
