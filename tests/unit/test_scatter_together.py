"""Both ends of the scatter path together, over real sockets and threads in this process."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dcp_connector.requests_prefill import Hold
from dcp_connector.work import StepWork
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import Engine, engine, prompt, wait_for
from tests.support.transfer_messages import a_load

PREFILL, DECODE = Sizes(2, 2, 4, 16, 1), Sizes(3, 3, 2, 16, 1)
ONE = Sizes(1, 1, 16, 16, 1)


def staging_in_use(side: Engine) -> list[int]:
    """Staging memory in use on each rank, as its gauge said last."""
    found = []
    for counters in side.counters:
        levels = (counters.take() or {}).get("staging_bytes", {"0": 0})
        found.append(max(levels.values()))
    return found


def test_many_requests_at_once_share_few_slots_and_all_arrive() -> None:
    """32 rows of 8 KiB in 2 layers are two chunks and more of a pull, and there are four slots of 256 KiB."""
    count, end = 12, 160
    options = {"path": "scatter", "staging_bytes": 1 << 20, "entry_bytes": 8192, "num_blocks": 48}
    with engine("kv_producer", PREFILL, **options) as p, engine("kv_consumer", DECODE, **options) as d:
        tables = {}
        for number in range(count):
            source = [(number * 5 + block) % 48 for block in range(5)]
            tables[number] = [number * 4 + block for block in range(4)], source
            p.start(StepWork(holds=[Hold(f"r{number}", f"r{number}", tuple(source), end, prompt(end), "")]))
        for number in range(count):
            d.load(f"r{number}", end, tables[number][0], p.origin, p.engine_id)
        over: set[tuple[int, str]] = set()

        def look() -> bool:
            for rank, worker in enumerate(d.workers):
                _, received = worker.finished()
                report = worker.take_report()
                assert not received or (report and set(report.received.values()) == {None})
                over.update((rank, request_id) for request_id in received)
            return len(over) == count * DECODE.t

        wait_for(look, 60, f"only {sorted(over)} arrived")
        assert staging_in_use(d) == [0] * DECODE.t
        for worker in d.workers:
            receiver = worker._decode._receiver  # type: ignore[union-attr]
            assert receiver.num_free_slots == 4
            assert receiver._known.by_pull == receiver._known.by_request == {}
        for rank in d.ranks:
            for target, source in tables.values():
                assert (row_at(rank.memory, target[0]) == row_of_prefill(p, rank.rank * 2, source[0])).all()


def row_at(memory: np.ndarray, block: int, row: int = 0) -> np.ndarray:
    """Return a row of a block in the first layer; a block is 16 rows of 8 KiB."""
    begin = (block * 16 + row) * 8192
    return memory[begin : begin + 8192]


def row_of_prefill(p: Engine, token: int, block: int) -> np.ndarray:
    """Return where prefill has one of the first tokens: shard and row for DCP 2 with interleave 4."""
    return row_at(p.ranks[token // 4].memory, block, token % 4)


def test_a_load_that_ended_while_its_peer_was_looked_up_leaves_nothing_behind() -> None:
    with engine("kv_producer", ONE) as p, engine("kv_consumer", ONE) as d:
        decode = d.workers[0]._decode
        assert decode
        peer = decode._book.find(p.origin, p.engine_id)
        ended = a_load(end=40, block_ids=(1, 2, 3))
        done = threading.Event()
        decode._loop.call(lambda: decode._resolved(ended, peer))
        decode._loop.call(done.set)
        assert done.wait(10)
        assert decode._receiver._known.by_pull == decode._receiver._known.by_request == {}


@pytest.mark.parametrize(("decode_path", "path"), [("direct", "direct"), ("pack", "direct"), ("auto", "scatter")])
def test_prefill_takes_another_path_when_decode_has_no_staging_memory(decode_path: str, path: str) -> None:
    with engine("kv_producer", ONE, path="scatter") as p, engine("kv_consumer", ONE, path=decode_path) as d:
        before = d.snapshot()
        p.hold("a", 40, [3, 1, 2])
        d.load("a", 40, [7, 2, 5], p.origin, p.engine_id)
        assert d.received("a") == ([None], set())
        assert d.differing_bytes(before, [7, 2, 5], 40) == [0]
        assert p.sent("a") == [None]
        assert (p.counters[0].take() or {})["paths"] == {path: 1}
