"""What transfers count on both sides, through the product's own workers, sockets and threads."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_connector.errors import Reason
from dcp_connector.stats import merge, observations
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import Engine, engine

PREFILL, DECODE = Sizes(2, 2, 1, 16, 1), Sizes(4, 4, 2, 16, 1)
TOKENS = 150
P_TABLE, D_TABLE = [3, 9, 1, 7, 12], [5, 2, 8]


def transfer(p: Engine, d: Engine, transfer_id: str) -> None:
    p.hold(transfer_id, TOKENS, P_TABLE)
    d.load(transfer_id, TOKENS, D_TABLE, p.origin, p.engine_id)
    assert d.received(transfer_id) == ([None] * 4, set())
    assert p.sent(transfer_id) == [None] * 2


def counted(side: Engine) -> dict[str, Any]:
    """All ranks' counters as one reading, every one of them known to Prometheus."""
    total: dict[str, Any] = {}
    for counters in side.counters:
        total = merge(total, counters.take() or {})
    shown = {metric.key for metric, _, _ in observations(total)}
    assert shown == total.keys()
    return total


@pytest.mark.parametrize("path", ["direct", "pack", "scatter"])
def test_a_transfer_counts_the_same_bytes_on_both_sides_and_leaves_no_staging_memory_in_use(path: str) -> None:
    with engine("kv_producer", PREFILL, path=path) as p, engine("kv_consumer", DECODE) as d:
        transfer(p, d, "first")
        sent, received = counted(p), counted(d)
        pulls = 8  # each of 4 decode shards shares tokens with each of 2 prefill shards
        entry_bytes = p.workers[0].facts.pages["layer.0"].entry_bytes if p.workers[0].facts else 0
        assert sent["bytes_sent"] == received["bytes_received"] == TOKENS * entry_bytes * 2
        assert sent["paths"] == {path: pulls}
        assert len(sent["write_seconds"]) == pulls
        assert all(0 <= seconds < 60 for seconds in sent["write_seconds"])
        assert sent["descriptors"] >= pulls
        used_on_prefill = {} if path == "direct" else {"0": 0, "1": 0}
        used_on_decode = {str(rank): 0 for rank in range(4)} if path == "scatter" else {}
        assert sent.get("staging_bytes", {}) == used_on_prefill
        assert received.get("staging_bytes", {}) == used_on_decode
        assert received.keys() - {"staging_bytes"} == {"bytes_received"}


def test_a_peer_that_does_not_fit_is_counted_once_by_each_rank_however_often_it_is_asked_for() -> None:
    with engine("kv_producer", PREFILL, facts={"model_hash": "other"}) as p, engine("kv_consumer", DECODE) as d:
        for number in range(3):
            d.load(f"x{number}", TOKENS, D_TABLE, p.origin, p.engine_id)
            assert d.received(f"x{number}")[0] == [Reason.INCOMPATIBLE] * 4
        assert counted(d)["refused_peers"] == 4


def test_pulls_that_prefill_refuses_are_counted_there_by_reason() -> None:
    with engine("kv_producer", PREFILL) as p, engine("kv_consumer", DECODE) as d:
        p.hold("short", 20, P_TABLE)
        d.load("short", TOKENS, D_TABLE, p.origin, p.engine_id)
        assert d.received("short")[0] == [Reason.SHORT_PROMPT] * 4
        refused = counted(p)["failed_pulls"]
        assert refused.keys() == {Reason.SHORT_PROMPT}
        assert refused[Reason.SHORT_PROMPT] >= 4
