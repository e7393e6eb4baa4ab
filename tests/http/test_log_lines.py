"""What the connector says in the log: one line per peer at the handshake, and nothing per transfer, block or token."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_connector import peers
from dcp_connector.errors import PeerError, Reason
from dcp_connector.handshake import RankFacts, SideFacts, Topology, assemble, side_layout
from dcp_connector.peers import PeerBook
from dcp_connector.wire import Layout, Page
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import Engine, engine

PREFILL, DECODE = Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1)
LAYOUT = Layout(1, 1, 16, 16, 1)


def transfer(p: Engine, d: Engine, transfer_id: str, num_tokens: int) -> None:
    p.hold(transfer_id, num_tokens, list(range(1, 8)))
    d.load(transfer_id, num_tokens, list(range(1, 5)), p.origin, p.engine_id)
    assert d.received(transfer_id) == ([None, None], set())
    assert p.sent(transfer_id) == [None]


def test_a_peer_is_announced_once_on_each_side_and_transfers_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dcp_connector")
    with engine("kv_producer", PREFILL) as p, engine("kv_consumer", DECODE) as d:
        caplog.clear()
        transfer(p, d, "first", 100)
        said = [record.getMessage() for record in caplog.records]
        # Two decode ranks judge the peer; prefill's one rank writes to two segments.
        assert len([words for words in said if f"prefill engine {p.engine_id} at {p.origin} fits" in words]) == 2
        assert len([words for words in said if f"(engine {d.engine_id}) by the " in words]) == 2
        assert len(said) == 4
        for number in range(12):
            transfer(p, d, f"later-{number}", 30 + number)
        assert len(caplog.records) == 4, [record.getMessage() for record in caplog.records[4:]]


def a_rank(role: str, engine_id: str, model: str = "h") -> RankFacts:
    side = SideFacts(engine_id, role, model, "tiny", "uint8", "rows", LAYOUT, 1)  # type: ignore[arg-type]
    return RankFacts(side, 0, 0, "tcp://10.0.0.1:5000", {"layer": Page(4096, 8, 16, 512, 512, 32, 32)})


@pytest.mark.parametrize(("model", "counted"), [("h", 0), ("another", 1)], ids=["fits", "refused"])
def test_a_peer_is_judged_logged_and_counted_once_however_many_requests_come_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, model: str, counted: int
) -> None:
    refused: list[None] = []
    answer: Topology = assemble("first start", [a_rank("kv_producer", "prefill", model)])
    book = PeerBook(
        a_rank("kv_consumer", "decode"), side_layout(LAYOUT), b"secret of these tests", lambda: refused.append(None)
    )
    monkeypatch.setattr(peers, "fetch_topology", lambda _origin, _secret: answer)

    def find(_: int) -> Reason | None:
        try:
            book.find("http://10.0.0.1:8998", None)
        except PeerError as error:
            return error.reason
        return None

    class Slow(logging.Handler):
        """A log that takes a while, so that all threads are there before the first one is done with the peer."""

        def emit(self, record: logging.LogRecord) -> None:
            threading.Event().wait(0.2)

    slow = Slow()
    logging.getLogger("dcp_connector").addHandler(slow)
    with caplog.at_level(logging.INFO, logger="dcp_connector"), ThreadPoolExecutor(16) as pool:
        outcomes = set(pool.map(find, range(200)))
    logging.getLogger("dcp_connector").removeHandler(slow)
    assert outcomes == ({Reason.INCOMPATIBLE} if counted else {None})
    assert len(caplog.records) == 1
    assert len(refused) == counted
