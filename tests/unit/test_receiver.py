"""The scatter path on decode: whose slots are whose, and that a pull ends only when nothing of it is left to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dcp_connector.errors import Reason
from dcp_connector.handshake import wire_layout, wire_page
from dcp_connector.pages import StagedUnits
from dcp_connector.receiver import MAX_SLOTS_PER_PULL, Answer, Receiver
from dcp_connector.staging import Staging
from dcp_connector.stats import Counters
from dcp_connector.tensors import describe
from dcp_connector.wire import Cancel, Chunk, Done, Failed, Grant, Pull, Settled, Taken, Want
from tests.support.kv_oracle import HEAD_MAJOR, Rank, Sizes
from tests.support.transfer_memory import tensors_of, wait_for
from tests.support.transfer_messages import ENGINE, a_pull

SIDE = Sizes(1, 1, 16, 16, 1)
ADDRESS = "tcp://prefill"
#: One row of one layer; a pull has 16 rows in each of 2 layers.
ROW = 16


class GatedStaging(Staging):
    """Scatters when the gate is open; may fail."""

    gate: threading.Event
    problem: Exception | None = None

    def scatter(self, slot: int, items: Sequence[StagedUnits], pages: Sequence[object]) -> None:
        assert self.gate.wait(10)
        if self.problem:
            raise self.problem
        super().scatter(slot, items, pages)


class Bench:
    """A receiver whose loop is this thread: `until` runs what was handed in."""

    def __init__(self, *, num_slots: int = 8, slot_rows: int = 4) -> None:
        self.rank = Rank(SIDE, 0, 0, 8, 2, ROW, HEAD_MAJOR)
        self.rank.memory[:] = 0
        self.tensors = list(tensors_of(self.rank).items())
        self.staging = GatedStaging([tensor for _, tensor in self.tensors], slot_rows * ROW, num_slots)
        self.staging.gate = threading.Event()
        self.staging.gate.set()
        self.inbox: list[Callable[[], None]] = []
        self.sent: list[tuple[str, Grant | Taken | Cancel]] = []
        self.delivered: list[Answer] = []
        self.counters = Counters()
        self.receiver = Receiver(
            self.staging,
            2,
            self.counters,
            self.inbox.append,
            lambda address, message: self.sent.append((address, message)),
            self.delivered.append,
        )

    def expect(self, pull_id: str, request_id: str = "request", *, engine: str = ENGINE) -> Pull:
        pull = a_pull(
            pull_id,
            end=16,
            layout=wire_layout(SIDE.layout()),
            pages={name: wire_page(describe(name, tensor, SIDE.layout(), 8).page) for name, tensor in self.tensors},
            block_table=np.array([2], dtype="<i8").tobytes(),
            prefill_engine=engine,
        )
        self.receiver.expect(request_id, ADDRESS, pull, SIDE.layout())
        return pull

    def until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            while self.inbox:
                self.inbox.pop(0)()
            return condition()

        wait_for(look, 10, f"sent {self.sent}, delivered {self.delivered}")

    def granted(
        self, pull_id: str, request_id: str = "request", *, engine: str = ENGINE, chunk_bytes: int = 1 << 20
    ) -> Grant:
        self.expect(pull_id, request_id, engine=engine)
        self.receiver.wanted(ADDRESS, Want(pull_id, chunk_bytes))
        self.until(lambda: bool(self.grants(pull_id)))
        return self.grants(pull_id)[0]

    def waits(self, pull_id: str, *, engine: str) -> None:
        """Let a pull of a request of the same name ask for slots that it doesn't get."""
        self.expect(pull_id, pull_id, engine=engine)
        self.receiver.wanted(ADDRESS, Want(pull_id, 64))
        self.until(lambda: any(landing.pull.pull_id == pull_id for landing in self.receiver._waiting))
        assert self.grants(pull_id) == []

    def grants(self, pull_id: str) -> list[Grant]:
        return [message for _, message in self.sent if isinstance(message, Grant) and message.pull_id == pull_id]

    def taken(self, pull_id: str) -> list[int]:
        return [m.number for _, m in self.sent if isinstance(m, Taken) and m.pull_id == pull_id]

    def settle(self) -> None:
        """Run everything that threads hand in."""
        self.receiver._pool.shutdown(wait=True)
        self.until(lambda: True)
        self.receiver.close()

    def in_use(self) -> int:
        counted = self.counters.take() or {}
        return counted.get("staging_bytes", {}).get("0", 0)


def test_chunks_are_scattered_into_the_pages_and_done_waits_for_the_last_one() -> None:
    bench = Bench()
    grant = bench.granted("a")
    assert len(grant.slots) == MAX_SLOTS_PER_PULL
    assert grant.chunk_bytes == 4 * ROW
    rows = np.arange(1, 33, dtype=np.uint8).repeat(ROW).reshape(8, 4 * ROW)
    base = bench.staging.base
    for number in range(8):
        slot = (grant.slots[number % 4] - base) // (4 * ROW)
        bench.staging._mover._buffer.reshape(-1, 4 * ROW)[slot] = rows[number]
        if number == 7:
            assert bench.receiver.holds_back(Done("a", 512))
            bench.until(lambda: True)
            assert bench.delivered == []
        assert bench.receiver.chunk(Chunk("a", number))
        bench.until(lambda number=number: bench.receiver._known.by_pull.get("a") is None or number in bench.taken("a"))
    assert bench.delivered == [Done("a", 512)]
    for layer, page in enumerate(bench.rank.pages):
        block = bench.rank.at(page.base + 2 * page.block_stride, 16 * ROW)
        assert (block == rows.ravel()[layer * 256 : (layer + 1) * 256]).all()
    assert int((bench.rank.memory != 0).sum()) == 512
    assert bench.receiver.num_free_slots == 8
    assert bench.in_use() == 0


@pytest.mark.parametrize(
    "message", [Chunk("a", 8), Chunk("a", 4), Chunk("b", 0), Chunk("a", 2**40)], ids=["last+1", "early", "who", "huge"]
)
def test_a_chunk_that_cannot_be_there_is_refused(message: Chunk) -> None:
    bench = Bench()
    bench.granted("a")
    assert not bench.receiver.chunk(message)
    bench.settle()
    assert bench.taken("a") == []


def test_a_repeated_chunk_is_scattered_once() -> None:
    bench = Bench()
    bench.granted("a")
    assert bench.receiver.chunk(Chunk("a", 0))
    assert not bench.receiver.chunk(Chunk("a", 0))
    bench.until(lambda: bench.taken("a") == [0])
    assert not bench.receiver.chunk(Chunk("a", 0))
    bench.settle()


def test_a_second_want_and_one_of_an_unknown_pull_are_ignored() -> None:
    bench = Bench(num_slots=16)
    bench.granted("a")
    bench.receiver.wanted(ADDRESS, Want("a", 64))
    bench.receiver.wanted(ADDRESS, Want("unknown", 64))
    bench.settle()
    assert len(bench.sent) == 1


def test_pulls_wait_in_order_for_slots_and_get_them_when_others_end() -> None:
    bench = Bench(num_slots=5)
    assert len(bench.granted("a", "first", engine="one").slots) == 3
    assert len(bench.granted("b", "second", engine="two").slots) == 2
    bench.waits("c", engine="three")
    bench.waits("d", engine="four")
    bench.receiver.halt("c")
    bench.receiver.forget("second")
    assert len(bench.grants("d")[0].slots) == 2
    assert bench.grants("c") == []
    assert set(bench.grants("d")[0].slots).isdisjoint(bench.grants("a")[0].slots)
    bench.settle()


def test_one_prefill_engine_never_has_all_slots() -> None:
    bench = Bench(num_slots=8)
    assert len(bench.granted("a", engine="one").slots) == 4
    bench.waits("b", engine="one")
    assert len(bench.granted("c", engine="two").slots) == 4
    assert bench.grants("b") == []
    bench.settle()


def test_slots_of_a_pull_that_failed_are_nobody_elses_before_its_writers_are_known_to_have_stopped() -> None:
    bench = Bench(num_slots=4)
    slots = bench.granted("a", "first", engine="one").slots
    bench.granted("b", engine="two")
    bench.waits("c", engine="three")
    failed = Failed("a", Reason.TRANSFER_ERROR, "words", 30.0)
    assert bench.receiver.holds_back(failed)
    assert bench.delivered == [failed]
    over: list[str] = []
    bench.receiver.when_quiet("first", lambda: over.append("finished"))
    assert over == ["finished"]
    assert bench.grants("c") == []
    bench.receiver.forget("first")
    assert set(bench.grants("c")[0].slots) == set(slots)
    bench.settle()


def test_a_pull_that_waits_for_pulls_that_were_given_up_takes_another_path() -> None:
    bench = Bench(num_slots=4)
    bench.granted("a", "first", engine="one")
    bench.granted("b", "second", engine="two")
    bench.waits("c", engine="three")
    bench.receiver.halt("a")
    assert bench.grants("c") == []
    bench.receiver.halt("b")
    assert bench.grants("c") == [Grant("c", (), 1)]
    bench.settle()


def test_a_request_is_not_over_while_a_thread_writes_into_its_blocks() -> None:
    bench, over = Bench(), []
    bench.granted("a")
    bench.staging.gate.clear()
    assert bench.receiver.chunk(Chunk("a", 0))
    bench.receiver.halt("a")
    assert bench.receiver.holds_back(Settled("a"))
    bench.receiver.when_quiet("request", lambda: over.append(1))
    assert not bench.receiver.chunk(Chunk("a", 1))
    bench.until(lambda: True)
    assert bench.delivered == over == []
    bench.staging.gate.set()
    bench.until(lambda: bool(over))
    assert bench.delivered == [Settled("a")]
    assert bench.taken("a") == []
    bench.settle()


def test_a_done_whose_chunks_got_lost_is_passed_on_when_the_pull_is_given_up() -> None:
    bench = Bench()
    bench.granted("a")
    assert bench.receiver.holds_back(Done("a", 512))
    assert bench.delivered == []
    bench.receiver.halt("a")
    assert bench.delivered == [Done("a", 512)]
    bench.settle()


def test_a_chunk_that_cannot_be_scattered_fails_the_pull() -> None:
    bench = Bench()
    pull = bench.expect("a")
    bench.receiver.wanted(ADDRESS, Want("a", 64))
    bench.until(lambda: bool(bench.grants("a")))
    bench.staging.problem = RuntimeError("the device is gone")
    assert bench.receiver.chunk(Chunk("a", 0))
    cancel = Cancel("a", pull.transfer_id, pull.prefill_engine, pull.prefill_rank)
    bench.until(lambda: (ADDRESS, cancel) in bench.sent)
    assert bench.receiver.holds_back(Done("a", 512))
    assert bench.delivered == [Failed("a", Reason.INTERNAL, "RuntimeError: the device is gone")]
    bench.settle()


def test_a_pull_whose_rows_fit_no_slot_is_told_to_take_another_path() -> None:
    bench = Bench()
    assert bench.granted("a", chunk_bytes=ROW - 1).slots == ()
    assert not bench.receiver.holds_back(Done("a", 512))
    bench.settle()


def test_without_staging_memory_every_writer_is_told_to_take_another_path() -> None:
    sent: list[Grant | Taken | Cancel] = []
    receiver = Receiver(None, 1, Counters(), lambda work: work(), lambda _, message: sent.append(message), print)
    receiver.expect("request", ADDRESS, a_pull("a"), SIDE.layout())
    receiver.wanted(ADDRESS, Want("a", 64))
    assert sent == [Grant("a", (), 1)]
    assert not receiver.holds_back(Done("a", 1))
    receiver.close()
