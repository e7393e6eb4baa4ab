"""A server that sends everyone on to another one, which writes down who came."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"


@contextmanager
def redirecting() -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of one that redirects, and what the other one was asked so far ("GET /path")."""
    came: list[str] = []

    class Elsewhere(_Quiet):
        def answer(self) -> None:
            came.append(f"{self.command} {self.path}")
            self.say(200, {})

    class Redirecting(_Quiet):
        def answer(self) -> None:
            self.say(307, {"location": f"http://{HOST}:{other.server_address[1]}/elsewhere"})

    with ExitStack() as stack:
        one, other = (ThreadingHTTPServer((HOST, 0), handler) for handler in (Redirecting, Elsewhere))
        for server in (one, other):
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        yield f"http://{HOST}:{one.server_address[1]}", came


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer()

    def say(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass
