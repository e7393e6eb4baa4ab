"""`GET /v1/failures`: why transfers failed, asked of an engine over real sockets, in words that name both sides."""

import json
import time
from typing import Any
from urllib.request import urlopen

import pytest

from dcp_connector.errors import Reason
from dcp_connector.failures import MAX_BYTES, FailureLog, decode, merged
from dcp_connector.health import RankHealth, RankWatch
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import HOST, Engine, engine

PREFILL = Sizes(t=1, w=1, i=4, b=4, h=1)
DECODE = Sizes(t=2, w=2, i=2, b=4, h=1)


def failures(of: Engine) -> list[dict[str, Any]]:
    with urlopen(f"{of.origin}/v1/failures", timeout=10) as answer:
        assert answer.status == 200
        return json.load(answer)["failures"]


def test_a_refused_handshake_is_told_with_the_values_of_both_sides() -> None:
    before = int(time.time())
    with (
        engine("kv_producer", PREFILL, facts={"kv_dtype": "fp8_e4m3"}) as p,
        engine("kv_consumer", DECODE) as d,
    ):
        assert failures(d) == []
        d.load("x", 8, [1, 2], p.origin, p.engine_id)
        assert d.received("x")[0] == [Reason.INCOMPATIBLE] * 2
        # What was found is the answer for a second.
        deadline = time.monotonic() + 10
        while not (found := failures(d)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (entry,) = found
        assert entry["reason"] == "incompatible"
        assert p.engine_id in entry["detail"]
        assert p.origin in entry["detail"]
        assert "KV dtype: prefill has fp8_e4m3, decode has uint8" in entry["detail"]
        assert entry["count"] == 2, "both ranks have refused it"
        assert before <= entry["at"] <= int(time.time())


def test_prefill_and_engines_without_failures_have_nothing_to_tell() -> None:
    with engine("kv_producer", PREFILL) as p:
        assert failures(p) == []


def test_what_is_kept_is_bounded_whatever_fails_and_however_often() -> None:
    log = FailureLog(lambda: 2.0**40)
    for _ in range(3):
        for reason in Reason:
            log.add(reason, "\x00" * 100_000)
    entries = log.entries()
    assert {entry["reason"] for entry in entries} == {reason.value for reason in Reason}
    assert {entry["count"] for entry in entries} == {3}
    assert len(json.dumps({"failures": entries})) <= MAX_BYTES


def test_the_newest_failure_of_a_kind_is_told_over_all_ranks_and_the_counts_are_added() -> None:
    def entry(reason: str, detail: str, count: int, at: int) -> dict[str, Any]:
        return {"reason": reason, "detail": detail, "count": count, "at": at}

    first = [entry("deadline", "old", 2, 10), entry("peer_lost", "only here", 1, 5)]
    second = [entry("deadline", "new", 3, 11)]
    expected = [entry("deadline", "new", 5, 11), entry("peer_lost", "only here", 1, 5)]
    assert merged([first, second]) == merged([second, first]) == expected


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"1", b'{"failures": 1}', b'{"failures": [1, {"reason": "x"}]}', b"[" * 100_000]
)
def test_an_answer_that_is_none_counts_as_no_failures(body: bytes) -> None:
    assert decode(body) == []


def test_a_rank_that_does_not_answer_keeps_the_others_from_nothing() -> None:
    log = FailureLog(lambda: 7.0)
    log.add(Reason.PEER_LOST, "gone")
    rank = RankHealth(HOST, list, log.entries)
    try:
        watch = RankWatch({"rank 0": f"{HOST}:1", "rank 1": rank.address})
        assert [entry["detail"] for entry in watch.failures()] == ["gone"]
    finally:
        rank.close()
