"""vllm-router: what the operator renders, read by its own parser, and how long it waits for an engine's answer."""

import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from dcp_operator import names
from dcp_operator.api.spec import Router, Spec
from dcp_operator.build import Context
from dcp_operator.build.router_pod import router_args
from dcp_operator.settings import Role
from tests.support.objects import spec
from tests.support.routers import router_python, running_router

REVISION = "0123abcd"
BOUND_S = 2
BOUND = (f"--request-timeout-secs={BOUND_S}",)
#: Far beyond the bound on the busiest machine, far below the router's default.
LATE_S = 200.0

_READ = """
import dataclasses, json, sys
from vllm_router.launch_router import parse_router_args
from vllm_router.router_args import RouterArgs
print(json.dumps([dataclasses.asdict(parse_router_args(json.loads(sys.argv[1]))), dataclasses.asdict(RouterArgs())]))
"""


def read(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the router's parser makes of an object's arguments, and its defaults."""
    found = Spec.model_validate(spec(**changes))
    arguments = router_args(Context("chat", "models", found, "acme/operator:1"), REVISION)
    command = [str(router_python()), "-c", _READ, json.dumps(arguments)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    as_read, defaults = json.loads(said.stdout)
    return as_read, defaults


def test_the_router_reads_what_was_meant():
    as_read, defaults = read(router={"requestTimeoutSeconds": 77})
    assert as_read["request_timeout_secs"] == 77
    for role in Role:
        assert as_read[f"{role}_selector"] == dict(names.selector("chat", role, REVISION))
    assert (as_read["service_discovery_namespace"], as_read["service_discovery_port"]) == ("models", 8000)
    meant = {
        *("host", "port", "vllm_pd_disaggregation", "service_discovery", "service_discovery_port"),
        *("service_discovery_namespace", "prefill_selector", "decode_selector", "prefill_policy", "decode_policy"),
        *("health_check_interval_secs", "worker_startup_check_interval", "request_timeout_secs"),
        *("prometheus_host", "prometheus_port", "log_level"),
    }
    assert {key for key, value in as_read.items() if value != defaults[key]} <= meant, "nothing else was changed"


def test_the_default_time_for_an_answer_is_the_routers_own():
    as_read, defaults = read()
    stated = Router().request_timeout_seconds
    assert as_read["request_timeout_secs"] == defaults["request_timeout_secs"] == stated


@dataclass(frozen=True, slots=True)
class Engine:
    """An HTTP server in place of an engine."""

    url: str
    bootstrap_url: str | None = None


@contextmanager
def engine(answers: bool) -> Iterator[Engine]:
    """An engine that is healthy in any case. It `answers` a stream at once and for ever, anything else at once."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def _whole(self, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self._whole({"data": []})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not answers:
                over.wait()
                return
            # Prefill is asked for one token, without a stream.
            if not asked.get("stream"):
                self._whole({"choices": [{"index": 0, "text": "x"}], "kv_transfer_params": {}})
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            event = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
            while not over.wait(0.1):
                try:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                except OSError:
                    self.close_connection = True
                    return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield Engine(f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def ask(router: str, *, stream: bool) -> bytes:
    body = json.dumps({"model": "chat", "prompt": "one two", "max_tokens": 100, "stream": stream}).encode()
    request = urllib.request.Request(f"{router}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=LATE_S) as answer:
        return answer.read()


@pytest.mark.parametrize("silent", list(Role))
def test_a_request_whose_engine_is_healthy_and_never_answers_ends_in_its_time(silent: Role, tmp_path: Path):
    with (
        engine(answers=silent is not Role.PREFILL) as prefill,
        engine(answers=silent is not Role.DECODE) as decode,
        running_router("nixl", [prefill], [decode], tmp_path, *BOUND, "--cb-failure-threshold=1") as router,
    ):
        # Its circuit breaker, which one failure should open, is no help: the second request waits as long as the first.
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(HTTPError) as refused:
                ask(router, stream=False)
            assert BOUND_S <= time.monotonic() - began < LATE_S
            said = refused.value.read().decode()
            assert refused.value.code == 500
            assert f"{silent.value.capitalize()} request" in said, "the router says which side is silent"
            assert "timed out" in said


def test_the_time_is_that_of_the_whole_answer_so_a_stream_that_goes_on_is_cut_off(tmp_path: Path):
    with (
        engine(answers=True) as prefill,
        engine(answers=True) as decode,
        running_router("nixl", [prefill], [decode], tmp_path, *BOUND) as router,
    ):
        began = time.monotonic()
        with pytest.raises(IncompleteRead) as cut:
            ask(router, stream=True)
        assert BOUND_S <= time.monotonic() - began < LATE_S
        assert b'"text": "x"' in cut.value.partial
