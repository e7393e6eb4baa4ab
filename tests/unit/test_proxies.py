"""The tests' stand-ins for public proxies send what those proxies send, to the byte."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import ClassVar

import pytest

from tests.support.proxies import ExampleProxy, ProxyError, Sidecar, token_ids

REQUEST = {"model": "tiny", "prompt": "a < b é", "max_tokens": 3, "stream": True, "stream_options": {"x": 1}}
ANSWER = {"choices": [{"token_ids": [7, 8]}]}


class _Handler(socketserver.StreamRequestHandler):
    """Remembers a request as it came, and answers it."""

    seen: ClassVar[list[tuple[str, bytes]]] = []

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.rfile.readline()
        length = next((int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"Content-Length")), 0)
        body = self.rfile.read(length)
        self.seen.append((head.decode(), body))
        answer = {"0": {"engine_id": "e", "worker_addr": {}}} if b"/query" in head else ANSWER
        text = json.dumps(answer).encode()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))


@pytest.fixture
def engine() -> Iterator[str]:
    """A server that takes the place of both engines and of the bootstrap port. Gives host:port."""
    _Handler.seen.clear()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def sent() -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    """What prefill and decode were sent: decode is the one that streams."""
    posts = [request for request in _Handler.seen if request[0].startswith("POST")]
    assert len(posts) == 2
    prefill, decode = sorted(posts, key=lambda request: b'"stream":true' in request[1])
    return prefill, decode


def test_the_example_proxys_requests(engine: str) -> None:
    url = f"http://{engine}"
    with closing(ExampleProxy([(url, url)], [url])) as proxy:
        assert token_ids(proxy.ask(REQUEST)) == (7, 8)
    (head, body), (decode_head, decode_body) = sent()
    transfer = json.loads(body)["kv_transfer_params"]["transfer_id"]
    assert body.decode() == (
        '{"model":"tiny","prompt":"a < b é","max_tokens":1,"stream":false,"kv_transfer_params":'
        f'{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{transfer}"}}}}'
    )
    assert head == (
        f"POST /v1/completions HTTP/1.1\r\nHost: {engine}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
        "Connection: keep-alive\r\nUser-Agent: python-httpx/0.28.1\r\nAuthorization: Bearer None\r\n"
        f"X-Request-Id: {transfer.removeprefix('xfer-')}\r\nX-data-parallel-rank: 0\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
    )
    assert decode_body.decode() == (
        '{"model":"tiny","prompt":"a < b é","max_tokens":3,"stream":true,"stream_options":{"x":1},'
        '"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,'
        f'"remote_bootstrap_addr":"{url}","remote_engine_id":"e","transfer_id":"{transfer}"}}}}'
    )
    assert "X-data-parallel-rank" not in decode_head


def test_the_sidecars_requests(engine: str) -> None:
    with closing(Sidecar(f"http://{engine}", {engine: int(engine.split(":")[1])})) as sidecar:
        assert token_ids(sidecar.ask(REQUEST, engine)) == (7, 8)
    (head, body), (decode_head, decode_body) = sent()
    transfer = json.loads(body)["kv_transfer_params"]["transfer_id"]
    assert body.decode() == (
        f'{{"kv_transfer_params":{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{transfer}"}},'
        '"max_tokens":1,"model":"tiny","prompt":"a \\u003c b é","stream":false}'
    )
    assert decode_body.decode() == (
        '{"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,'
        f'"remote_bootstrap_addr":"http://{engine}","remote_engine_id":"e","transfer_id":"{transfer}"}},'
        '"max_tokens":3,"model":"tiny","prompt":"a \\u003c b é","stream":true,"stream_options":{"x":1}}'
    )
    assert "X-Data-Parallel-Rank: 0\r\n" in head
    assert "X-Data-Parallel-Rank" not in decode_head


def test_a_streamed_answer_is_read_to_its_end() -> None:
    event = b'data: {"choices":[{"token_ids":[%d]}]}\n\n'
    assert token_ids(event % 1 + event % 2 + b'data: {"choices":[]}\n\ndata: [DONE]\n\n') == (1, 2)
    with pytest.raises(ProxyError, match="the stream ended with"):
        token_ids(event % 1)
