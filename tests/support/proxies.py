"""A public proxy with the serial flow, and what two with the concurrent flow send to engines, byte for byte.

The first is in Mooncake's own package, which engines have, and runs as it is. The other two ask prefill and decode at
the same time, and read the prefill engine's `GET /query` once and then remember the engine ids. Neither can run in
these tests: one is not part of vLLM's package, the other is a Go program. So these clients send the same requests,
header by header and key by key, as read from

    ExampleProxy  vllm-project/vllm, examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py at 41c5903;
                  its HTTP client is httpx 0.28
    Sidecar       llm-d/llm-d-router, pkg/sidecar/proxy/connector_mooncake.go at 0545789, pkg/common/request/tokens.go;
                  its HTTP client is Go's httputil.ReverseProxy

A test's request is a JSON object for /v1/completions, with or without `stream`.
"""

import http.client
import itertools
import json
import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from devcluster.engine import ensure_engine_environment
from devcluster.paths import this_cache
from tests.support.engines import RunningEngine
from tests.support.ports import free_ports
from tests.support.process_groups import ProcessGroup

__all__ = ["ExampleProxy", "ProxyError", "Sidecar", "mooncake_proxy", "token_ids"]

_PATH = "/v1/completions"
_TIMEOUT_S = 120.0

Headers = Iterable[tuple[str, str]]


class ProxyError(Exception):
    """An engine answered what the proxy would fail on."""


@contextmanager
def mooncake_proxy(prefills: Sequence[RunningEngine], decodes: Sequence[RunningEngine], folder: Path) -> Iterator[str]:
    """Run the proxy of Mooncake's package between these engines for the length of a block. Gives its address."""
    python = ensure_engine_environment(this_cache().root, print) / "bin" / "python3"
    (port,) = free_ports(1)
    command = [str(python), "-m", "mooncake.vllm_v1_proxy_server", "--host=127.0.0.1", f"--port={port}"]
    for role, engines in (("prefiller", prefills), ("decoder", decodes)):
        addresses = [urlsplit(engine.url) for engine in engines]
        command += [f"--{role}-hosts", *(str(address.hostname) for address in addresses)]
        command += [f"--{role}-ports", *(str(address.port) for address in addresses)]
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    group = ProcessGroup.start(command, variables, folder / f"mooncake-proxy-{port}.log")
    try:
        group.wait_for_http(f"http://127.0.0.1:{port}/healthcheck", 60.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        group.stop()


class _Proxy:
    """What both have in common: prefill's answer is not waited for, but its status is looked at."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(16)
        self._prefills: list[Future[bytes]] = []

    def close(self) -> None:
        """Wait for the prefill requests under way. Raises ProxyError if one of them failed."""
        self._threads.shutdown()
        for each in self._prefills:
            each.result()


class ExampleProxy(_Proxy):
    """vLLM's example proxy: engines in turn, data-parallel ranks of a prefill engine too."""

    def __init__(self, prefills: Sequence[tuple[str, str]], decodes: Sequence[str]) -> None:
        """Read the engine ids of prefill engines, given as (url, bootstrap url)."""
        super().__init__()
        ranks: list[tuple[str, str, int, str]] = []
        for url, bootstrap_url in prefills:
            _exchange("GET", url, "/health", _httpx())
            answer = json.loads(_exchange("GET", bootstrap_url, "/query", _httpx()))
            engine_ids = {int(dp_rank): entry["engine_id"] for dp_rank, entry in answer.items()}
            ranks += [(url, bootstrap_url, dp_rank, engine_ids[dp_rank]) for dp_rank in range(len(answer))]
        self._turns = itertools.cycle(ranks)
        self._decodes = itertools.cycle(decodes)
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> bytes:
        """Return decode's answer."""
        request_id = str(uuid.uuid4())
        with self._lock:
            url, bootstrap_url, dp_rank, engine_id = next(self._turns)
            decode_url = next(self._decodes)
        to_prefill = dict(request)
        to_prefill["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": f"xfer-{request_id}",
        }
        to_prefill["stream"] = False
        to_prefill["max_tokens"] = 1
        if "max_completion_tokens" in to_prefill:
            to_prefill["max_completion_tokens"] = 1
        to_prefill.pop("stream_options", None)
        # OPENAI_API_KEY is not set, and the proxy writes Python's word for that.
        headers = [("Authorization", "Bearer None"), ("X-Request-Id", request_id)]
        with_rank = [*headers, ("X-data-parallel-rank", str(dp_rank))]
        body = _compact(to_prefill)
        self._prefills.append(self._threads.submit(_exchange, "POST", url, _PATH, _httpx(with_rank, body), body))
        to_decode = {
            **request,
            "kv_transfer_params": {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": bootstrap_url,
                "remote_engine_id": engine_id,
                "transfer_id": f"xfer-{request_id}",
            },
        }
        body = _compact(to_decode)
        return _exchange("POST", decode_url, _PATH, _httpx(headers, body), body)


class Sidecar(_Proxy):
    """llm-d's routing sidecar, beside one decode engine: the scheduler names the prefill engine in a header."""

    def __init__(self, decode_url: str, bootstrap_ports: Mapping[str, int]) -> None:
        """`bootstrap_ports` by prefill host:port; the sidecar has one setting for all, and here they share a host."""
        super().__init__()
        self._decode_url = decode_url
        self._bootstrap_ports = bootstrap_ports
        self._engine_ids: dict[str, dict[str, str]] = {}

    def ask(self, request: Mapping[str, Any], prefill: str) -> bytes:
        """Return decode's answer to a request that came with `x-prefiller-host-port: prefill`."""
        bootstrap_addr = f"http://{urlsplit(f'http://{prefill}').hostname}:{self._bootstrap_ports[prefill]}"
        dp_rank, engine_id = next(iter(self._engine_map(prefill, bootstrap_addr).items()))
        transfer_id = f"xfer-{uuid.uuid4()}"
        to_prefill = dict(request)
        to_prefill["kv_transfer_params"] = {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "transfer_id": transfer_id,
        }
        to_prefill["max_tokens"] = 1
        to_prefill.pop("min_tokens", None)
        to_prefill["stream"] = False
        to_prefill.pop("stream_options", None)
        to_decode = {
            **request,
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer_id,
                "remote_bootstrap_addr": bootstrap_addr,
                "remote_engine_id": engine_id,
            },
        }
        body = _go_json(to_prefill)
        headers = _go(body, prefill, ("X-Data-Parallel-Rank", dp_rank))
        self._prefills.append(self._threads.submit(_exchange, "POST", f"http://{prefill}", _PATH, headers, body))
        body = _go_json(to_decode)
        return _exchange("POST", self._decode_url, _PATH, _go(body, prefill), body)

    def _engine_map(self, prefill: str, bootstrap_addr: str) -> dict[str, str]:
        """Return engine ids by data-parallel rank; every key at the top of the answer is taken for a rank."""
        if prefill not in self._engine_ids:
            agent = [("User-Agent", "Go-http-client/1.1"), ("Accept-Encoding", "gzip")]
            answer = json.loads(_exchange("GET", bootstrap_addr, "/query", agent))
            if not isinstance(answer, dict) or not all(isinstance(entry, dict) for entry in answer.values()):
                raise ProxyError(f"Go can't read {answer} into a map of maps")
            found = {rank: entry["engine_id"] for rank, entry in answer.items() if "engine_id" in entry}
            if not found:
                raise ProxyError(f"engine_id not found in {answer}")
            self._engine_ids[prefill] = found
        return self._engine_ids[prefill]


def token_ids(answer: bytes) -> tuple[int, ...]:
    """Return the generated tokens of a completion that was asked with return_token_ids, streamed or not."""
    if not answer.startswith(b"data: "):
        return tuple(json.loads(answer)["choices"][0]["token_ids"])
    events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line]
    if events[-1] != b"[DONE]":
        raise ProxyError(f"the stream ended with {events[-1]!r}")
    chunks = [json.loads(event) for event in events[:-1]]
    return tuple(token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"] or ())


def _compact(value: Mapping[str, Any]) -> bytes:
    """JSON as httpx 0.28 writes it: keys in their order, no spaces, UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _go_json(value: Mapping[str, Any]) -> bytes:
    """JSON as Go's json.Marshal writes maps: keys sorted, and HTML's special characters escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()


def _httpx(headers: Headers = (), body: bytes | None = None) -> Headers:
    """Headers of httpx around the proxy's own."""
    sent = [
        ("Accept", "*/*"),
        ("Accept-Encoding", "gzip, deflate"),
        ("Connection", "keep-alive"),
        ("User-Agent", "python-httpx/0.28.1"),
        *headers,
    ]
    return sent if body is None else [*sent, ("Content-Length", str(len(body))), ("Content-Type", "application/json")]


def _go(body: bytes, prefill: str, *more: tuple[str, str]) -> Headers:
    """Headers of a request that curl sent to the sidecar, and that Go's reverse proxy passes on: sorted."""
    passed = [
        ("Accept", "*/*"),
        ("Content-Type", "application/json"),
        *more,
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Prefiller-Host-Port", prefill),
    ]
    return [("User-Agent", "curl/8.5.0"), ("Content-Length", str(len(body))), *passed]


def _exchange(method: str, url: str, path: str, headers: Headers, body: bytes | None = None) -> bytes:
    """Send exactly these headers after Host, and return the body of the answer. Raises ProxyError unless it is 200."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT_S)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in (("Host", address.netloc), *headers):
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ProxyError(f"{method} {url}{path} answered {response.status}: {answer[:500]!r}")
    return answer
