"""Writing for decode ranks: one batch at a time per peer, none after a deadline, each failure with its reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from dcp_connector.errors import Reason
from dcp_connector.requests_prefill import Written
from dcp_connector.transfer import STRAGGLERS_S, TransferError
from tests.support.transfer_memory import MemoryTransport, wait_for
from tests.support.transfer_sender import SenderBench


class CountingTransport(MemoryTransport):
    """Knows how many batches run at the same time, for each peer and in all."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._during = during
        self.running: dict[str, int] = {}
        self.most_per_peer = self.most = 0

    def write(self, segment: str, src: Sequence[int], dst: Sequence[int], length: Sequence[int]) -> None:
        with self._lock:
            self.running[segment] = self.running.get(segment, 0) + 1
            self.most_per_peer = max(self.most_per_peer, self.running[segment])
            self.most = max(self.most, sum(self.running.values()))
        try:
            self._during()
            super().write(segment, src, dst, length)
        finally:
            with self._lock:
                self.running[segment] -= 1


def test_a_pull_is_written_and_counted() -> None:
    bench = SenderBench(MemoryTransport())
    bench.submit("a")
    bench.wait(1)
    bench.sender.close()
    assert bench.done == {"a": Written(2 * 16 * 16)}
    counted = bench.counters.take()
    assert counted
    assert counted["bytes_sent"] == 512


def test_one_batch_is_in_flight_per_peer_and_peers_do_not_wait_for_each_other() -> None:
    transport = CountingTransport(lambda: time.sleep(0.05))
    bench = SenderBench(transport, transfer_threads=4)
    for number in range(12):
        bench.submit(f"p{number}", segment=f"peer-{number % 3}")
    bench.wait(12)
    bench.sender.close()
    assert transport.most_per_peer == 1
    assert transport.most == 3


def test_nothing_is_written_after_the_deadline() -> None:
    transport = MemoryTransport()
    bench = SenderBench(transport)
    bench.submit("late", deadline=time.monotonic() - 1)
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["late"].failure
    assert failure
    assert failure.reason is Reason.DEADLINE
    assert transport.batches == []


def test_a_halted_pull_stops_before_its_next_batch() -> None:
    gate = threading.Event()
    transport = CountingTransport(lambda: gate.wait(5))
    bench = SenderBench(transport, path="direct", max_batch_descriptors=1)
    bench.submit("halted")
    wait_for(lambda: transport.most == 1, 5, "the first batch did not begin")
    bench.sender.halt("halted")
    gate.set()
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["halted"].failure
    assert failure
    assert failure.reason is Reason.CANCELLED
    assert transport.batches == [1]


def test_halting_what_is_over_leaves_nothing_behind() -> None:
    bench = SenderBench(MemoryTransport())
    bench.submit("a")
    bench.wait(1)
    bench.sender.halt("a")
    bench.sender.close()
    assert bench.sender._deliveries == {}


def test_a_batch_that_failed_is_reported_with_the_time_that_its_stragglers_may_take() -> None:
    def fail() -> None:
        raise TransferError("one of its descriptors failed")

    bench = SenderBench(MemoryTransport(fail))
    bench.submit("a")
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["a"].failure
    assert failure
    assert failure.reason is Reason.TRANSFER_ERROR
    assert bench.done["a"].quiet_s == STRAGGLERS_S


def test_a_layer_that_this_rank_does_not_have_is_refused_and_nothing_is_written() -> None:
    transport = MemoryTransport()
    bench = SenderBench(transport)
    bench.pages["layer.2"] = bench.pages["layer.0"]
    bench.submit("unknown")
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["unknown"].failure
    assert failure
    assert failure.reason is Reason.INCOMPATIBLE
    assert "layer.2" in failure.detail
    assert transport.batches == []


def test_a_pull_of_no_layers_is_done_at_once() -> None:
    transport = MemoryTransport()
    bench = SenderBench(transport)
    bench.pages = {}
    bench.submit("none")
    bench.wait(1)
    bench.sender.close()
    assert bench.done["none"] == Written(0)
    assert transport.batches == []


def test_a_block_outside_the_peers_cache_is_refused() -> None:
    transport = MemoryTransport()
    bench = SenderBench(transport)
    bench.submit("wild", blocks=(8,))
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["wild"].failure
    assert failure
    assert failure.reason is Reason.OUT_OF_BOUNDS
    assert transport.batches == []
