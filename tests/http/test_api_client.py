"""The API server's client over real sockets: when it comes again, and what it never sends twice."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from dcp_operator.client import BOOKMARK, Api, ApiError
from dcp_operator.kinds import SERVICE

BUSY = (429, {"Retry-After": "3"}, {"reason": "TooManyRequests", "message": "too many requests"})
DONE = (200, {}, {"kind": "Service", "metadata": {"name": "chat"}})
MANIFEST = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat"}}


class Server:
    """Answers with what it is given, one after another, the last one for ever. None cuts the connection."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict, dict | bytes] | None] = [DONE]
        self.asked: list[tuple[str, str]] = []
        self.clients: set[tuple] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                outer.asked.append((self.command, self.path))
                outer.clients.add(self.client_address)
                given = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                if given is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, headers, body = given
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response_only(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = "Content-Length" in headers

            do_GET = do_PATCH = do_POST = do_DELETE = answer  # noqa: N815 - names of http.server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def api(server: Server, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    def no_credentials(configuration, context=None) -> None:
        configuration.host = server.url

    monkeypatch.setattr("dcp_operator.client.load_credentials", no_credentials)
    found = Api(sleep=pauses.append, keep=lambda body: {key: value for key, value in body.items() if key != "spec"})
    yield found
    found.close()


def test_a_write_that_the_server_had_no_time_for_is_sent_again_when_it_said(
    api: Api, server: Server, pauses: list[float]
):
    server.answers = [BUSY, BUSY, DONE]
    assert api.apply(SERVICE, "models", MANIFEST)["metadata"]["name"] == "chat"
    assert len(server.asked) == 3
    assert len(pauses) == 2
    assert all(3.0 <= pause <= 3.6 for pause in pauses)


def test_a_server_that_stays_busy_is_a_failure_in_the_end(api: Api, server: Server, pauses: list[float]):
    server.answers = [BUSY]
    with pytest.raises(ApiError, match="too many requests") as caught:
        api.get(SERVICE, "models", "chat")
    assert caught.value.status == 429
    assert len(server.asked) == len(pauses) + 1 == 6


def test_no_server_can_have_a_call_wait_for_long(api: Api, server: Server, pauses: list[float]):
    server.answers = [(429, {"Retry-After": "86400"}, {}), DONE]
    api.get(SERVICE, "models", "chat")
    assert pauses[0] <= 6.0


def test_a_refusal_without_a_time_is_told_at_once(api: Api, server: Server, pauses: list[float]):
    server.answers = [(429, {}, {"message": "no"}), DONE]
    with pytest.raises(ApiError, match="no"):
        api.get(SERVICE, "models", "chat")
    assert pauses == []


@pytest.mark.parametrize("call", ["apply", "get"])
def test_what_may_have_reached_the_server_is_not_sent_twice(api: Api, server: Server, call: str):
    server.answers = [None, DONE]
    with pytest.raises(ApiError, match="does not answer") as caught:
        api.apply(SERVICE, "models", MANIFEST) if call == "apply" else api.get(SERVICE, "models", "chat")
    assert caught.value.status == 0
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [200, 404])
def test_the_time_of_an_answer_is_that_of_the_server_and_not_of_this_machine(api: Api, server: Server, status: int):
    server.answers = [(status, {"Date": "Sun, 06 Nov 2033 08:49:37 GMT"}, {"message": "none"})]
    api.get(SERVICE, "models", "chat")
    assert api.clock.now().startswith("2033-11-06T08:49:")


def test_calls_share_a_connection(api: Api, server: Server):
    server.answers = [DONE, BUSY, (404, {}, {"message": "none"}), DONE]
    for _ in range(4):
        api.get(SERVICE, "models", "chat")
    assert len(server.clients) == 1


def watched(api: Api) -> list[tuple[str, dict]]:
    return list(api.watch(SERVICE, "models", "dcpdisagg.io/name", "7"))


def lines(*events: dict) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def test_a_watch_asks_for_bookmarks_and_keeps_of_an_object_what_is_wanted(api: Api, server: Server):
    service = {"kind": "Service", "metadata": {"name": "chat", "resourceVersion": "8"}}
    mark = {"kind": "Service", "metadata": {"resourceVersion": "9"}}
    events = lines(
        {"type": "ADDED", "object": {**service, "spec": {"ports": []}}},
        {"type": "BOOKMARK", "object": mark},
    )
    # What is cut in the middle of a line was not told.
    server.answers = [(200, {}, events + b'{"type": "DELE')]
    assert watched(api) == [("ADDED", service), (BOOKMARK, mark)]
    asked = parse_qs(urlsplit(server.asked[0][1]).query)
    assert (asked["allowWatchBookmarks"], asked["resourceVersion"]) == (["true"], ["7"])
    assert asked["labelSelector"] == ["dcpdisagg.io/name"]


@pytest.mark.parametrize("where", ["at once", "later"])
def test_a_version_that_is_too_old_is_told_by_its_status(api: Api, server: Server, where: str):
    refusal = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    server.answers = [
        (410, {}, refusal) if where == "at once" else (200, {}, lines({"type": "ERROR", "object": refusal}))
    ]
    with pytest.raises(ApiError, match="too old resource version") as caught:
        watched(api)
    assert (caught.value.status, caught.value.reason) == (410, "Expired")


def test_a_watch_that_is_cut_is_a_failure_and_not_an_end(api: Api, server: Server):
    # Fewer bytes than were promised.
    server.answers = [(200, {"Content-Length": "1000"}, lines())]
    with pytest.raises(ApiError, match="the watch of services was cut") as caught:
        watched(api)
    assert caught.value.status == 0
