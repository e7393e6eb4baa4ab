"""A small HTTP server in threads of its own, and a client that can't be held up: GET of a few paths, nothing more.

The server answers while the engine computes, serves a bounded number of connections, cuts each off after a while, and
keeps nothing per client.
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

from typing_extensions import override

logger = logging.getLogger(__name__)

#: Connections served at the same time; more are closed at once.
MAX_CONNECTIONS = 64
#: A connection is cut off after this, however its client spends the time, so that probes find a free one.
CLIENT_TIMEOUT_S = 5.0

#: Status, headers, body.
Answer = tuple[int, dict[str, str], bytes]
#: Returns the answer to a path (without the query string).
Responder = Callable[[str], Answer]


class HttpServer:
    """Serves `respond` on `port` of `host` until `close`; an empty host means all addresses of both families.

    Raises OSError when the port is taken or the address isn't this machine's.
    """

    def __init__(self, host: str, port: int, respond: Responder, name: str) -> None:
        self._server = _listen(host, port, respond)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name=name, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on (useful when 0 was asked for)."""
        return self._server.server_address[1]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def text(status: int, words: str) -> Answer:
    """Return an answer of one line."""
    return status, {"Content-Type": "text/plain; charset=utf-8"}, f"{words}\n".encode()


def json_text(status: int, value: object) -> Answer:
    """Return a value as JSON."""
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def get(host: str, port: int, path: str, timeout_s: float, limit: int) -> Answer:
    """GET without redirects, by an overall deadline: status, headers in lower case, at most `limit` + 1 bytes of body.

    Raises OSError, http.client.HTTPException, ValueError.
    """
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


class _Server(ThreadingHTTPServer):
    """A threading server with a bound on its threads."""

    daemon_threads = True
    # A restarted engine must get its port back at once; two live servers still can't share one.
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, respond: Responder, family: socket.AddressFamily) -> None:
        self.address_family = family
        self.respond = respond
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

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
        logger.debug("%s: connection of %s ended early", self.__class__.__name__, client_address, exc_info=True)


def _listen(host: str, port: int, respond: Responder) -> _Server:
    """Listen on one address, or on all of both families, or of IPv4 where the host has no IPv6. Raises OSError."""
    if host and ":" not in host:
        return _Server(host, port, respond, socket.AF_INET)
    try:
        return _Server(host, port, respond, socket.AF_INET6)
    except OSError as error:
        if host or error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENOPROTOOPT):
            raise
    return _Server(host, port, respond, socket.AF_INET)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD from the server's table."""

    protocol_version = "HTTP/1.1"
    server_version = "dcp-connector"
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
        logger.debug("http: %s", format % args)
