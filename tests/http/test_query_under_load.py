"""/query and /v1/topology at start-up and under load, where vLLM's own bootstrap server timed out.

vLLM issues 55114 and 55763: requests time out while engines start; 42199: the server shares a busy worker's loop.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from dcp_connector import httpd
from dcp_connector.bootstrap import BootstrapServer, fetch_topology
from dcp_connector.errors import PeerError, Reason
from dcp_connector.handshake import RankFacts, SideFacts, Topology, assemble
from dcp_connector.wire import Layout, Page

SECRET = b"the secret of these tests"
RANKS, LAYERS = 8, 60


def a_topology() -> Topology:
    """A large engine's: 8 ranks of 60 layers."""
    side = SideFacts("engine-1", "kv_producer", "h", "large", "uint8", "rows", Layout(RANKS, 1, 16, 16, 1), 1)
    pages = {f"model.layers.{layer}.self_attn": Page(4096, 8, 16, 512, 512, 32, 32) for layer in range(LAYERS)}
    return assemble("g", [RankFacts(side, tp, 0, f"tcp://10.0.0.1:500{tp}", pages) for tp in range(RANKS)])


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    made = BootstrapServer(0, 1, SECRET, serves_query=True)
    yield made
    made.close()


def query(server: BootstrapServer) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", "/query", headers={"Connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextmanager
def busy_engine(num_threads: int = 2) -> Iterator[None]:
    """Threads that compute in Python without a pause, as an engine's scheduler does under load."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(2000))

    threads = [threading.Thread(target=compute) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_from_the_first_moment_query_answers_at_once_and_never_lists_a_part_of_the_ranks(
    server: BootstrapServer,
) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    asked, published = threading.Event(), threading.Event()

    def ask_until_ready(_: int) -> None:
        while True:
            after = published.is_set()
            status, body = query(server)
            ranks = len(json.loads(body)["0"]["worker_addr"]) if json.loads(body) else 0
            seen[status, ranks] += 1
            asked.set()
            if status == 200:
                return
            assert not after, "published, but not served"

    with busy_engine(), ThreadPoolExecutor(4) as pool:
        asking = pool.map(ask_until_ready, range(4))
        assert asked.wait(30)
        server.publish(a_topology())
        published.set()
        list(asking)
    assert seen.keys() == {(503, 0), (200, RANKS)}


def test_a_decode_engine_that_comes_first_is_told_to_come_again(server: BootstrapServer) -> None:
    origin = f"http://127.0.0.1:{server.port}"
    with pytest.raises(PeerError, match="the workers have not reported their KV pages yet") as error:
        fetch_topology(origin, SECRET)
    assert error.value.reason is Reason.BOOTSTRAP_UNREACHABLE
    server.publish(a_topology())
    assert fetch_topology(origin, SECRET) == a_topology()


def test_a_busy_engine_answers_all_of_many_clients_in_full(server: BootstrapServer) -> None:
    server.publish(a_topology())
    with busy_engine(), ThreadPoolExecutor(16) as pool:
        queries = pool.map(lambda _: query(server), range(60))
        topologies = pool.map(lambda _: fetch_topology(f"http://127.0.0.1:{server.port}", SECRET, 30.0), range(10))
        assert len(set(queries)) == 1
        assert {each.generation for each in topologies} == {"g"}


def test_clients_that_hold_every_connection_are_cut_off_and_the_next_is_served(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpd, "CLIENT_TIMEOUT_S", 0.3)
    server.publish(a_topology())
    held = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(httpd.MAX_CONNECTIONS)]
    for each in held:
        each.connect()
    status = 0
    while status != 200:
        try:
            status, _ = query(server)
        except (OSError, http.client.HTTPException):
            continue
    for each in held:
        each.close()
