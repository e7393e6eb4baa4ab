"""Writing for decode ranks: one batch at a time per peer, none after a deadline, each failure with its reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dcp_connector.config import ConnectorConfig
from dcp_connector.errors import Reason
from dcp_connector.handshake import wire_layout, wire_page
from dcp_connector.requests_prefill import Write, Written
from dcp_connector.sender import Sender
from dcp_connector.stats import Counters
from dcp_connector.tensors import describe
from dcp_connector.transfer import TransferError
from tests.support.kv_oracle import HEAD_MAJOR, Rank, Sizes
from tests.support.transfer_memory import MemoryTransport, tensors_of, wait_for
from tests.support.transfer_messages import a_hold, a_pull

SIDE = Sizes(1, 1, 16, 16, 1)
FAR = time.monotonic() + 1e6


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


class Bench:
    """A sender with its own prefill and decode memory."""

    def __init__(self, transport: MemoryTransport, **config: object) -> None:
        self.prefill, self.decode = (Rank(SIDE, 0, 0, 8, 2, 16, HEAD_MAJOR) for _ in range(2))
        layout = SIDE.layout()
        layers = [describe(name, tensor, layout, 8) for name, tensor in tensors_of(self.prefill).items()]
        targets = [describe(name, tensor, layout, 8) for name, tensor in tensors_of(self.decode).items()]
        self.pages = {layer.name: wire_page(layer.page) for layer in targets}
        self.done: dict[str, Written] = {}
        self.counters = Counters()
        options = ConnectorConfig(mooncake_protocol="tcp", staging_bytes=1 << 20, **config)
        self.sender = Sender(
            transport,
            tuple(layers),
            layout,
            0,
            options,
            self.counters,
            lambda _transfer, pull_id, written: self.done.update({pull_id: written}),
            whole_pages=False,
        )
        self.sender.prepare()

    def submit(
        self, pull_id: str, *, segment: str = "peer", deadline: float = FAR, blocks: tuple[int, ...] = (2,)
    ) -> None:
        pull = a_pull(
            pull_id,
            end=16,
            layout=wire_layout(SIDE.layout()),
            pages=self.pages,
            segment=segment,
            block_table=np.array(blocks, dtype="<i8").tobytes(),
        )
        self.sender.submit(Write(pull, a_hold(num_tokens=16), deadline), None)

    def wait(self, count: int) -> None:
        wait_for(lambda: len(self.done) == count, 10, f"only {list(self.done)} were reported")


def test_a_pull_is_written_and_counted() -> None:
    bench = Bench(MemoryTransport())
    bench.submit("a")
    bench.wait(1)
    bench.sender.close()
    assert bench.done == {"a": Written(2 * 16 * 16)}
    counted = bench.counters.take()
    assert counted
    assert counted["bytes_sent"] == 512


def test_one_batch_is_in_flight_per_peer_and_peers_do_not_wait_for_each_other() -> None:
    transport = CountingTransport(lambda: time.sleep(0.05))
    bench = Bench(transport, transfer_threads=4)
    for number in range(12):
        bench.submit(f"p{number}", segment=f"peer-{number % 3}")
    bench.wait(12)
    bench.sender.close()
    assert transport.most_per_peer == 1
    assert transport.most == 3


def test_nothing_is_written_after_the_deadline() -> None:
    transport = MemoryTransport()
    bench = Bench(transport)
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
    bench = Bench(transport, path="direct", max_batch_descriptors=1)
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
    bench = Bench(MemoryTransport())
    bench.submit("a")
    bench.wait(1)
    bench.sender.halt("a")
    bench.sender.close()
    assert bench.sender._halted == bench.sender._active == set()


def test_a_batch_that_failed_is_reported_only_after_stragglers_had_time() -> None:
    def fail() -> None:
        raise TransferError("one of its descriptors failed")

    bench = Bench(MemoryTransport(fail), cancel_grace_s=0.3)
    started = time.monotonic()
    bench.submit("a")
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["a"].failure
    assert failure
    assert failure.reason is Reason.TRANSFER_ERROR
    assert 0.3 <= time.monotonic() - started < 3


@pytest.mark.parametrize("asked", [("layer.0", "layer.1", "layer.2"), ()], ids=["one more", "none"])
def test_layers_that_this_rank_does_not_have_are_refused_and_nothing_is_written(asked: tuple[str, ...]) -> None:
    transport = MemoryTransport()
    bench = Bench(transport)
    some = next(iter(bench.pages.values()))
    bench.pages = {name: bench.pages.get(name, some) for name in asked}
    bench.submit("unknown")
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["unknown"].failure
    assert failure
    assert failure.reason is Reason.INCOMPATIBLE
    assert ("layer.2" in failure.detail) is bool(asked)
    assert transport.batches == []


def test_a_block_outside_the_peers_cache_is_refused() -> None:
    transport = MemoryTransport()
    bench = Bench(transport)
    bench.submit("wild", blocks=(8,))
    bench.wait(1)
    bench.sender.close()
    failure = bench.done["wild"].failure
    assert failure
    assert failure.reason is Reason.OUT_OF_BOUNDS
    assert transport.batches == []
