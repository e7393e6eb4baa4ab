"""The scatter path on prefill: what it asks, when it writes, and that waiting holds neither a thread nor memory."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dcp_connector.chunks import plan_chunks
from dcp_connector.errors import Reason
from dcp_connector.requests_prefill import Written
from dcp_connector.wire import Chunk, Grant, Taken, Want
from tests.support.transfer_memory import MemoryTransport, wait_for
from tests.support.transfer_sender import SenderBench

#: One row of one layer. A pull of `SenderBench` has 16 rows in each of 2 layers.
ROW = 16


class Slots:
    """Decode's staging memory."""

    def __init__(self, count: int, chunk_bytes: int) -> None:
        self.memory = np.zeros((count, chunk_bytes), dtype=np.uint8)
        self.chunk_bytes = chunk_bytes

    def grant(self, pull_id: str) -> Grant:
        addresses = tuple(int(slot.ctypes.data) for slot in self.memory)
        return Grant(pull_id, addresses, self.chunk_bytes)


def waiting(**config: object) -> SenderBench:
    """Return a bench with one pull that has asked for slots and got no answer."""
    bench = SenderBench(MemoryTransport(), path="scatter", transfer_threads=1, **config)
    bench.prefill.memory[:] = np.arange(len(bench.prefill.memory)) % 251
    bench.submit("a")
    wait_for(lambda: len(bench.told) == 1 and bench.is_parked(), 10, f"the pull did not wait: {bench.told}")
    return bench


def told(bench: SenderBench, count: int) -> list[int]:
    """Wait until so many chunks were announced and the pull waits again; return their numbers."""
    wait_for(lambda: len(bench.told) == 1 + count, 10, f"{bench.told} instead of {count} chunks")
    return [message.number for message in bench.told[1:] if isinstance(message, Chunk)]


def test_a_pull_asks_for_slots_and_writes_only_as_many_chunks_as_decode_has_taken() -> None:
    bench, slots = waiting(), Slots(2, 4 * ROW)
    assert bench.told == [Want("a", 1 << 19)]
    bench.sender.granted(slots.grant("a"))
    assert told(bench, 2) == [0, 1]
    wait_for(bench.is_parked, 10, "the pull did not wait")
    assert bench.done == {}
    bench.sender.taken(Taken("a", 1))
    bench.sender.taken(Taken("a", 7))
    wait_for(bench.is_parked, 10, "the pull did not wait")
    assert told(bench, 2) == [0, 1]
    for number in range(6):
        bench.sender.taken(Taken("a", number))
        told(bench, max(4, number + 3))  # chunk 1 was taken first
    bench.wait(1)
    bench.sender.close()
    assert bench.done == {"a": Written(2 * 16 * 16)}
    assert told(bench, 8) == list(range(8))
    counted = bench.counters.take()
    assert counted
    assert counted["paths"] == {"scatter": 1}
    assert counted["staging_bytes"] == {"0": 0}


def test_the_bytes_of_a_chunk_are_its_rows_in_token_order() -> None:
    bench, slots = waiting(), Slots(8, 4 * ROW)
    bench.sender.granted(slots.grant("a"))
    bench.wait(1)
    bench.sender.close()
    block = 0  # what the prompt has on prefill
    expected = [
        bench.prefill.at(
            bench.prefill.pages[part.layer].base + (block * 16 + part.first_row) * ROW, part.num_rows * ROW
        )
        for chunk in plan_chunks(16, (ROW, ROW), 4 * ROW)
        for part in chunk.parts
    ]
    assert (slots.memory.ravel() == np.concatenate(expected)).all()


def test_a_pull_that_waits_holds_no_thread_and_no_staging_memory() -> None:
    bench, slots = waiting(), Slots(1, ROW)
    bench.sender.granted(slots.grant("a"))
    told(bench, 1)
    wait_for(bench.is_parked, 10, "the pull did not wait")
    # The only thread and the only staging memory serve another pull of the same peer meanwhile.
    bench.submit("b")
    wait_for(lambda: Want("b", 1 << 19) in bench.told, 10, "the other pull was not begun")
    bench.sender.granted(Slots(40, ROW).grant("b"))
    bench.wait(1)
    assert list(bench.done) == ["b"]
    bench.sender.halt("a")
    bench.wait(2)
    bench.sender.close()


@pytest.mark.parametrize("granted", [False, True], ids=["before the grant", "between chunks"])
def test_a_pull_that_waits_ends_at_once_when_it_is_given_up(granted: bool) -> None:
    bench = waiting()
    if granted:
        bench.sender.granted(Slots(1, ROW).grant("a"))
        told(bench, 1)
    bench.sender.halt("a")
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["a"].failure
    assert failure
    assert failure.reason is Reason.CANCELLED


def test_a_pull_that_waits_ends_at_its_deadline() -> None:
    bench = SenderBench(MemoryTransport(), path="scatter")
    bench.submit("a", deadline=time.monotonic() + 0.2)
    wait_for(bench.is_parked, 10, "the pull did not wait")
    timer = bench.sender.next_timer()
    assert timer
    bench.sender.tick(timer - 0.1)
    assert bench.done == {}

    def tick() -> bool:
        bench.sender.tick(time.monotonic())
        return bool(bench.done)

    wait_for(tick, 10, "the deadline was not noticed")
    bench.sender.close()
    failure = bench.done["a"].failure
    assert failure
    assert failure.reason is Reason.DEADLINE
    assert bench.sender.next_timer() is None


def test_without_slots_the_pull_takes_another_path() -> None:
    bench = waiting()
    bench.sender.granted(Grant("a", (), 1))
    bench.wait(1)
    bench.sender.close()
    assert bench.done == {"a": Written(2 * 16 * 16)}
    counted = bench.counters.take()
    assert counted
    assert counted["paths"] == {"direct": 1}


def test_only_the_first_grant_counts_and_what_is_over_ignores_all() -> None:
    bench, slots, other = waiting(), Slots(8, 4 * ROW), Slots(8, 4 * ROW)
    bench.sender.granted(slots.grant("a"))
    bench.sender.granted(other.grant("a"))
    bench.wait(1)
    bench.sender.granted(other.grant("a"))
    bench.sender.taken(Taken("a", 0))
    bench.sender.granted(other.grant("never asked"))
    bench.sender.close()
    assert not other.memory.any()


@pytest.mark.parametrize(("chunk_bytes", "words"), [(1 << 20, "wanted were"), (ROW - 1, "can't hold one row")])
def test_chunks_larger_than_wanted_or_smaller_than_a_row_are_refused_before_anything_is_written(
    chunk_bytes: int, words: str
) -> None:
    bench = waiting()
    bench.sender.granted(Grant("a", (4096,), chunk_bytes))
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["a"].failure
    assert failure
    assert failure.reason is Reason.OUT_OF_BOUNDS
    assert words in failure.detail
