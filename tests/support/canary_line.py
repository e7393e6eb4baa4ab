"""Two stand-in engines and a serial router as HTTP servers of this process, for checks of the KV transfer."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dcp_operator.canary.request import Engine, Request
from dcp_operator.canary.schedule import Subject
from dcp_operator.settings import Role
from tests.support import stand_in_engine

HOST = "127.0.0.1"
NUM_TOKENS = 65


@dataclass
class Line:
    """A pair behind a router. `bodies` are what the router got, `answers` what it says instead of asking."""

    prefill: stand_in_engine.Engine
    decode: stand_in_engine.Engine
    urls: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)
    #: Prompts of others that the router sends along with each of the check's: whether they are transferred.
    others: list[bool] = field(default_factory=list)

    def request(self, **changes: Any) -> Request:
        """A check of this pair."""
        engines = (
            Engine("p", Role.PREFILL, f"{self.urls['prefill']}/metrics", None),
            Engine("d", Role.DECODE, f"{self.urls['decode']}/metrics", f"{self.urls['bootstrap']}/v1/failures"),
        )
        values = {"router_url": self.urls["router"], "model": "chat", "num_tokens": NUM_TOKENS, "engines": engines}
        return Request(**{"subject": Subject("r1", "e1"), **values, **changes})

    def ask(self, body: dict[str, Any]) -> tuple[int, str]:
        """Answer as vllm-router's serial flow does."""
        self.bodies.append(body)
        if self.answers:
            return self.answers.pop(0)
        for is_transferred in self.others:
            self._serially({**body, "prompt": "others " * 2 * NUM_TOKENS}, is_transferred=is_transferred)
        return self._serially(body)

    def _serially(self, body: dict[str, Any], *, is_transferred: bool = True) -> tuple[int, str]:
        first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        status, text = post(f"{self.urls['prefill']}/v1/completions", first)
        if status != 200:
            return 500, f"Prefill server {self.urls['prefill']} returned {status}: {text}"
        params = json.loads(text).get("kv_transfer_params") if is_transferred else None
        return post(f"{self.urls['decode']}/v1/completions", {**body, "kv_transfer_params": params})


@contextmanager
def line(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, policy: str = "recompute"
) -> Iterator[Line]:
    """A pair whose stand-ins are told something (`stand_in_engine` lists what)."""
    found = Line(_engine("kv_producer", prefill, policy), _engine("kv_consumer", decode, policy))
    with ExitStack() as stack:
        servers = {
            "prefill": stand_in_engine.server(found.prefill, 0, is_api=True, host=HOST),
            "decode": stand_in_engine.server(found.decode, 0, is_api=True, host=HOST),
            "pull": stand_in_engine.server(found.prefill, 0, is_api=False, host=HOST),
            "bootstrap": stand_in_engine.server(found.decode, 0, is_api=False, host=HOST),
            "router": _router(found),
        }
        found.prefill.bootstrap_port = servers["pull"].server_address[1]
        for name, server in servers.items():
            found.urls[name] = f"http://{HOST}:{server.server_address[1]}"
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        yield found


def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """POST a body; return status and text."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _engine(kv_role: str, told: dict[str, Any] | None, policy: str) -> stand_in_engine.Engine:
    transfer = json.dumps({"kv_role": kv_role, "kv_load_failure_policy": policy})
    environment = {"STAND_IN": json.dumps(told or {}), "STAND_IN_POD": f"chat-{kv_role}", "VLLM_HOST_IP": HOST}
    engine = stand_in_engine.Engine([f"--kv-transfer-config={transfer}"], environment)
    engine.is_open.set()
    return engine


def _router(of: Line) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, text = of.ask(body)
            self.send_response(status)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    return server
