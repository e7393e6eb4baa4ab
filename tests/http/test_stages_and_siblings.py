"""Pipeline stages on either side, and data-parallel ranks behind one bootstrap port, with the product's own threads."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dcp_connector.errors import Reason
from tests.support.kv_oracle import Sizes
from tests.support.ports import first_of_free_ports
from tests.support.transfer_memory import Engine, engine

PREFILL, DECODE = Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1)
TOKENS = 70
P_TABLE, D_TABLE = [3, 9, 1, 7, 12], [5, 2, 8]


def check(p: Engine, d: Engine, transfer_id: str, *, origin: str = "", end: int = TOKENS) -> None:
    """A transfer is right on every rank of decode, and every rank of prefill gives its blocks back."""
    p.hold(transfer_id, TOKENS, P_TABLE)
    before = d.snapshot()
    d.load(transfer_id, end, D_TABLE, origin or p.origin, p.engine_id)
    assert d.received(transfer_id) == ([None] * len(d.workers), set())
    assert d.differing_bytes(before, D_TABLE, end) == [0] * len(d.workers)
    assert set(p.sent(transfer_id)) == {None}


@pytest.mark.parametrize("stages", [(1, 2), (2, 1), (2, 2)], ids=lambda stages: "{} to {}".format(*stages))
def test_pages_are_matched_by_layer_whatever_the_stages_of_the_two_sides(stages: tuple[int, int]) -> None:
    with (
        engine("kv_producer", PREFILL, stages=stages[0]) as p,
        engine("kv_consumer", DECODE, stages=stages[1]) as d,
    ):
        check(p, d, "whole prompt")
        check(p, d, "one token: a rank of each stage has none", end=1)


def test_a_prefill_rank_keeps_the_blocks_until_every_stage_of_decode_has_its_layers() -> None:
    with engine("kv_producer", PREFILL) as p, engine("kv_consumer", DECODE, stages=2) as d:
        p.hold("slow stage", TOKENS, P_TABLE)
        first, rest = d.workers[:2], d.workers[2:]
        d.workers = first
        d.load("slow stage", TOKENS, D_TABLE, p.origin, p.engine_id)
        assert d.received("slow stage") == ([None, None], set())
        assert p.workers[0].finished() == (set(), set())
        d.workers = rest
        d.load("slow stage", TOKENS, D_TABLE, p.origin, p.engine_id)
        assert d.received("slow stage") == ([None, None], set())
        assert p.sent("slow stage") == [None]


@contextmanager
def siblings(count: int) -> Iterator[list[Engine]]:
    """Data-parallel ranks of one prefill engine on successive ports."""
    with ExitStack() as stack:
        first = first_of_free_ports(count)
        yield [
            stack.enter_context(
                engine("kv_producer", PREFILL, port=first + rank, facts={"engine_id": f"prefill_dp{rank}"})
            )
            for rank in range(count)
        ]


def test_query_on_the_first_port_names_all_data_parallel_ranks_and_nothing_else() -> None:
    with siblings(3) as ranks:
        with urllib.request.urlopen(f"{ranks[0].origin}/query", timeout=10) as response:
            answer = json.load(response)
        assert {number: entry["engine_id"] for number, entry in answer.items()} == {
            "0": "prefill_dp0",
            "1": "prefill_dp1",
            "2": "prefill_dp2",
        }
        for entry in answer.values():
            assert set(entry) == {"engine_id", "worker_addr"}
        assert len({entry["worker_addr"]["0"]["0"] for entry in answer.values()}) == 3


def test_a_stranger_on_the_next_port_is_no_data_parallel_rank() -> None:
    first = first_of_free_ports(2)
    with (
        engine("kv_producer", PREFILL, port=first, facts={"engine_id": "prefill_dp0"}) as p,
        engine("kv_producer", PREFILL, port=first + 1, facts={"engine_id": "other_dp1"}),
        urllib.request.urlopen(f"{p.origin}/query", timeout=10) as response,
    ):
        assert set(json.load(response)) == {"0"}


def test_decode_finds_each_rank_by_its_engine_id_at_the_address_that_routers_know() -> None:
    with siblings(2) as (first, second), engine("kv_consumer", DECODE) as d:
        for number, p in enumerate((second, first, second)):
            check(p, d, f"by the first port {number}", origin=first.origin)
        check(second, d, "by its own port")


def test_an_outdated_engine_id_of_data_parallel_ranks_still_fails_fast() -> None:
    with siblings(2) as (first, _), engine("kv_consumer", DECODE) as d:
        d.load("old", TOKENS, D_TABLE, first.origin, "before-the-restart_dp1")
        stale = Reason.STALE_ENGINE_ID
        assert d.received("old") == ([stale, stale], set(D_TABLE))
        d.load("beyond", TOKENS, D_TABLE, first.origin, "prefill_dp2")
        gone = Reason.BOOTSTRAP_UNREACHABLE
        assert d.received("beyond") == ([gone, gone], set(D_TABLE))
