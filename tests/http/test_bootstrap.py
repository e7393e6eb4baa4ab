"""The bootstrap server over real sockets: its routes, its answers under load, its end."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dcp_connector import httpd
from dcp_connector.bootstrap import BootstrapServer, fetch_topology
from dcp_connector.errors import PeerError, Reason, StartupError
from dcp_connector.handshake import RankFacts, SideFacts, Topology, assemble
from dcp_connector.wire import Layout, Page

SECRET = b"the secret of these tests"
PAGE = Page(4096, 8, 16, 512, 512, 32, 32)


def a_topology() -> Topology:
    side = SideFacts("engine-1", "kv_producer", "h", "tiny", "uint8", "rows", Layout(2, 1, 16, 16, 1), 1)
    return assemble("g", [RankFacts(side, tp, 0, f"tcp://10.0.0.1:500{tp}", {"layer": PAGE}) for tp in (0, 1)])


@pytest.fixture
def api() -> Iterator[HTTPServer]:
    """The engine's own HTTP server; `status` is what /health answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(self.server.status if self.path == "/health" else 404)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.status = 200  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def server(api: HTTPServer) -> Iterator[BootstrapServer]:
    made = BootstrapServer(0, api.server_address[1], SECRET, serves_query=True)
    yield made
    made.close()


def get(server: BootstrapServer, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request(method, path, headers={"Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_query_is_exactly_what_routers_expect(server: BootstrapServer) -> None:
    server.publish(a_topology())
    status, body = get(server, "/query")
    assert status == 200
    assert json.loads(body) == {
        "0": {
            "engine_id": "engine-1",
            "worker_addr": {"0": {"0": "tcp://10.0.0.1:5000"}, "1": {"0": "tcp://10.0.0.1:5001"}},
        }
    }


def test_before_the_workers_are_up_nothing_is_ready(server: BootstrapServer) -> None:
    assert get(server, "/query") == (503, "{}")
    assert get(server, "/v1/topology")[0] == 503
    assert get(server, "/readyz") == (503, "the workers have not reported their KV pages yet\n")
    assert get(server, "/healthz") == (503, "the workers have not reported their KV pages yet\n")


def test_health_names_every_rank_that_is_not_well(server: BootstrapServer) -> None:
    problems: list[str] = []
    server.publish(a_topology(), lambda: problems)
    assert get(server, "/healthz") == (200, "ok\n")
    problems += ["rank tp 0 pp 0: the prefill thread has died", "rank tp 1 pp 0: doesn't answer"]
    assert get(server, "/healthz") == (503, "\n".join([*problems, ""]))
    assert get(server, "/query")[0] == 200


def test_ready_means_that_the_engine_itself_is_healthy(server: BootstrapServer, api: HTTPServer) -> None:
    server.publish(a_topology())
    assert get(server, "/readyz") == (200, "ready\n")
    api.status = 503  # type: ignore[attr-defined]
    status, words = get(server, "/readyz")
    assert status == 503
    assert words == f"the engine's /health on port {api.server_address[1]} answers 503\n"


def test_an_engine_that_hangs_in_a_step_is_not_ready_although_it_calls_itself_healthy(api: HTTPServer) -> None:
    took = [0.0]
    made = BootstrapServer(0, api.server_address[1], SECRET, serves_query=True, stalled_s=lambda: took[0])
    try:
        made.publish(a_topology())
        took[0] = 59.0
        assert get(made, "/readyz") == (200, "ready\n")
        took[0] = 61.0
        assert get(made, "/readyz") == (503, "the engine hangs: it has been computing one step for 61 s\n")
        took[0] = 0.0
        assert get(made, "/readyz") == (200, "ready\n")
    finally:
        made.close()


def test_ready_says_so_when_the_engine_does_not_answer() -> None:
    made = BootstrapServer(0, 1, SECRET, serves_query=True)
    made.publish(a_topology())
    status, words = get(made, "/readyz")
    made.close()
    assert status == 503
    assert words.startswith("the engine's /health on port 1 doesn't answer: ")


def test_a_consumer_has_no_workers_to_be_asked_for(api: HTTPServer) -> None:
    made = BootstrapServer(0, api.server_address[1], SECRET, serves_query=False)
    made.publish(a_topology())
    assert get(made, "/query")[0] == 404
    assert get(made, "/readyz")[0] == 200
    made.close()


@pytest.mark.parametrize("path", ["/", "/etc/passwd", "/../query", "/v1/topology/x", "/%00"])
def test_other_paths_are_not_there(server: BootstrapServer, path: str) -> None:
    assert get(server, path)[0] == 404


def test_a_query_string_does_not_matter_and_other_methods_are_refused(server: BootstrapServer) -> None:
    server.publish(a_topology())
    assert get(server, "/query?x=1")[0] == 200
    assert get(server, "/query", "HEAD") == (200, "")
    assert get(server, "/query", "POST")[0] == 501


def test_the_topology_is_read_back_and_its_signature_checked(server: BootstrapServer) -> None:
    server.publish(a_topology())
    origin = f"http://127.0.0.1:{server.port}"
    assert fetch_topology(origin, SECRET) == a_topology()
    with pytest.raises(PeerError, match="not signed with this engine's control secret") as error:
        fetch_topology(origin, b"another secret")
    assert error.value.reason is Reason.BOOTSTRAP_GARBAGE


def test_a_server_that_never_answers_is_given_up(server: BootstrapServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PeerError, match="doesn't answer") as error:
        fetch_topology(f"http://127.0.0.1:{silent.getsockname()[1]}", SECRET, timeout_s=0.3)
    assert error.value.reason is Reason.BOOTSTRAP_UNREACHABLE


def test_a_server_that_trickles_its_answer_is_given_up_by_an_overall_deadline() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                for _ in range(60):
                    connection.sendall(b"x")
                    if stop.wait(0.05):
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        started = time.monotonic()
        with pytest.raises(PeerError) as error:
            fetch_topology(f"http://127.0.0.1:{listener.getsockname()[1]}", SECRET, timeout_s=0.4)
        took = time.monotonic() - started
        stop.set()
        thread.join()
    assert error.value.reason is Reason.BOOTSTRAP_UNREACHABLE
    assert took < 1.5


def test_a_client_that_trickles_its_request_is_cut_off_by_an_overall_deadline(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpd, "CLIENT_TIMEOUT_S", 0.4)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(0.05)
        started = time.monotonic()
        while time.monotonic() - started < 3:
            try:
                sock.sendall(b"G")
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        took = time.monotonic() - started
    assert 0.3 < took < 1.5


def test_peers_reach_the_server_over_ipv4_and_ipv6(server: BootstrapServer) -> None:
    server.publish(a_topology())
    for host in ("127.0.0.1", "::1") if has_ipv6() else ("127.0.0.1",):
        with socket.create_connection((host, server.port), timeout=5) as sock:
            sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 200"


def test_a_host_without_ipv6_is_served_over_ipv4(monkeypatch: pytest.MonkeyPatch, api: HTTPServer) -> None:
    real = httpd._Server.server_bind

    def bind(server: httpd._Server) -> None:
        if server.address_family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        real(server)

    monkeypatch.setattr(httpd._Server, "server_bind", bind)
    made = BootstrapServer(0, api.server_address[1], SECRET, serves_query=True)
    made.publish(a_topology())
    assert get(made, "/query")[0] == 200
    made.close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_noise_and_clients_that_hang_up_do_no_harm(server: BootstrapServer) -> None:
    server.publish(a_topology())
    for noise in (b"", b"\x00" * 4000, b"GET", b"GET /query HTTP/9.9\r\n\r\n", b"A" * 100_000):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(noise)
    assert get(server, "/query")[0] == 200


def test_idle_connections_are_bounded_and_others_are_still_served(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(a_topology())
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(httpd.MAX_CONNECTIONS + 20)]
    alive = threading.active_count()
    assert alive < httpd.MAX_CONNECTIONS + 30
    for sock in idle:
        sock.close()
    with ThreadPoolExecutor(8) as pool:
        assert {get(server, "/query")[0] for _ in pool.map(lambda _: None, range(40))} == {200}


def test_a_taken_port_is_a_sentence(server: BootstrapServer) -> None:
    with pytest.raises(StartupError, match=f"can't listen on port {server.port}: .*set kv_connector_extra_config"):
        BootstrapServer(server.port, 1, SECRET, serves_query=True)


def test_a_closed_server_gives_its_port_back(api: HTTPServer) -> None:
    first = BootstrapServer(0, api.server_address[1], SECRET, serves_query=True)
    port = first.port
    first.publish(a_topology())
    assert get(first, "/query")[0] == 200
    first.close()
    second = BootstrapServer(port, api.server_address[1], SECRET, serves_query=True)
    second.close()
