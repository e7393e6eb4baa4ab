"""A small HTTP server in threads of its own: it answers probes and scrapes whatever the event loop is doing."""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from dcp_operator.environment import SettingError

log = logging.getLogger(__name__)

#: A client that is slower than this is cut off, in seconds.
_TIMEOUT_S = 10.0


class Answer(NamedTuple):
    """Status, content and its type."""

    status: int
    content: bytes
    content_type: str = "text/plain; charset=utf-8"


def words(problems: list[str]) -> Answer:
    """Return the answer of a probe: 200 where nothing is wrong, else 503 with what is."""
    return Answer(503, ("; ".join(problems) + "\n").encode()) if problems else Answer(200, b"ok\n")


class SideServer:
    """Answers GET requests to the paths given; anything else is not found."""

    def __init__(self, port: int, paths: Mapping[str, Callable[[], Answer]], host: str = "0.0.0.0") -> None:  # noqa: S104 - a pod's own address is known to its network only
        """Open the port. Raises SettingError where that is taken."""
        routes = dict(paths)

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                route = routes.get(self.path.partition("?")[0])
                answer = route() if route is not None else Answer(404, b"not found\n")
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.content_type)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
                """Say nothing: probes and scrapes are many."""

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise SettingError(f"port {port} can't be opened: {error.strerror}; choose another one") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"port-{port}", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is open."""
        return self._server.server_address[1]

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - socketserver's form
        """Log a defect; say nothing of clients that left."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.error("request not answered error=%r", error)
