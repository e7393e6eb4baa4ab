"""Looking peers up: what was learned, also of failures, is used by the next request instead of asking again."""

from __future__ import annotations

import pytest

from dcp_connector import peers
from dcp_connector.errors import PeerError, Reason
from dcp_connector.handshake import RankFacts, SideFacts, Topology, assemble, side_layout
from dcp_connector.peers import PeerBook
from dcp_connector.wire import Layout, Page

LAYOUT = Layout(1, 1, 16, 16, 1)
ORIGIN = "http://10.0.0.1:8998"


def rank(role: str, engine_id: str) -> RankFacts:
    side = SideFacts(engine_id, role, "h", "tiny", "uint8", "rows", LAYOUT, 1)  # type: ignore[arg-type]
    return RankFacts(side, 0, 0, "tcp://10.0.0.1:5000", {"layer": Page(4096, 8, 16, 512, 512, 32, 32)})


class Bench:
    """A peer book whose fetches are counted. `answer` is what the bootstrap server says; `now` is the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: Topology | PeerError = assemble("g", [rank("kv_producer", "new")])
        self.fetches = 0
        self.now = 1000.0
        self.book = PeerBook(rank("kv_consumer", "decode"), side_layout(LAYOUT), b"secret of these tests")
        monkeypatch.setattr(peers, "fetch_topology", self._fetch)
        monkeypatch.setattr(peers.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(peers.time, "sleep", lambda _seconds: None)

    def _fetch(self, _origin: str, _secret: bytes) -> Topology:
        self.fetches += 1
        if isinstance(self.answer, PeerError):
            raise self.answer
        return self.answer

    def refused(self, engine_id: str | None) -> Reason:
        with pytest.raises(PeerError) as error:
            self.book.topology(ORIGIN, engine_id)
        return error.value.reason


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_a_stale_engine_id_is_looked_up_once_and_then_fails_fast_for_a_while(bench: Bench) -> None:
    assert [bench.refused("old") for _ in range(5)] == [Reason.STALE_ENGINE_ID] * 5
    assert bench.fetches == 2
    bench.now += 10
    bench.refused("old")
    assert bench.fetches == 4


def test_what_was_fetched_for_a_stale_engine_id_serves_the_right_one(bench: Bench) -> None:
    bench.refused("old")
    assert bench.book.topology(ORIGIN, "new").side.engine_id == "new"
    assert bench.fetches == 2


def test_a_dead_address_is_asked_once_and_then_fails_fast_for_a_moment(bench: Bench) -> None:
    alive, bench.answer = bench.answer, PeerError(Reason.BOOTSTRAP_UNREACHABLE, "nobody listens")
    for engine_id in ("new", None, "new"):
        assert bench.refused(engine_id) is Reason.BOOTSTRAP_UNREACHABLE
        bench.now += 0.3
    assert bench.fetches == 1
    bench.answer = alive
    bench.now += 2
    assert bench.book.topology(ORIGIN, "new").side.engine_id == "new"
