"""What a step of the engine and a rank's memory cost, however many requests wait and however long their prompts are."""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dcp_connector.config import ConnectorConfig, staging_shares
from dcp_connector.requests_decode import Load
from dcp_connector.requests_prefill import Hold
from dcp_connector.work import StepWork
from dcp_connector.worker import WorkerSide
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import Engine, MemoryTransport, engine, prompt, wait_for
from tests.unit.test_scheduler_side import FETCH, HAND_OFF, FakeRequest, Side, finish

ONE, TWO = Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1)
MANY = 1000


def calls_of(worker: WorkerSide) -> int:
    """Count the calls, C functions included, that asking for finished requests makes."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    worker.finished()
    gc.disable()  # what a collection finalizes would be counted
    sys.setprofile(count)
    try:
        worker.finished()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@contextmanager
def waiting(count: int) -> Iterator[tuple[Engine, Engine]]:
    """Run both sides with so many requests for which decode waits and whose prompts prefill never computes."""
    with ExitStack() as stack:
        # Nothing may time out, however long a busy machine takes for all of them to arrive.
        p, d = (stack.enter_context(engine(r, ONE, request_timeout_s=3600)) for r in ("kv_producer", "kv_consumer"))
        loads = [Load(f"r{n}", f"t{n}", p.origin, p.engine_id, (1,), 0, 16, b"") for n in range(count)]
        d.start(StepWork(loads=loads))
        requests = p.workers[0]._prefill._requests
        wait_for(lambda: requests.num_waiting == count, 300, f"{requests.num_waiting} of {count} pulls arrived")
        yield p, d


def test_asking_for_finished_requests_costs_the_same_with_a_thousand_parked_ones() -> None:
    with waiting(0) as idle:
        few = [calls_of(side.workers[0]) for side in idle]
    with waiting(MANY) as busy:
        many = [calls_of(side.workers[0]) for side in busy]
    assert many == few
    assert max(few) < 100


@pytest.mark.parametrize("earlier", [0, MANY])
def test_a_step_tells_the_workers_only_what_came_up_in_it(earlier: int) -> None:
    prefill, decode = Side(producer=True, consumer=False), Side(producer=False, consumer=True)
    for number in range(earlier + 1):
        if number == earlier:
            prefill.side.take_work()
            decode.side.take_work()
        name = f"{number:08}"
        finish(prefill, FakeRequest({**HAND_OFF, "transfer_id": name}, request_id=name))
        request = FakeRequest({**FETCH, "transfer_id": name}, num_computed_tokens=0, request_id=name)
        decode.side.allocated(request, [1, 2], 99)
    held, loaded = prefill.side.take_work(), decode.side.take_work()
    assert (len(held.holds), len(loaded.loads)) == (1, 1)
    assert len(pickle.dumps(held)) < 1500
    assert len(pickle.dumps(loaded)) < 1500
    assert prefill.side.take_work().is_empty()
    assert decode.side.take_work().is_empty()


class Registry(MemoryTransport):
    """Remembers what was registered and refuses a byte twice, like the TransferEngine."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    def register(self, address: int, num_bytes: int) -> None:
        for other, size in self.ranges:
            assert address + num_bytes <= other or other + size <= address, "registered twice"
        self.ranges.append((address, num_bytes))


@pytest.mark.parametrize("staging_bytes", [1 << 20, (5 << 20) + 3, 256 << 20])
@pytest.mark.parametrize(
    ("role", "path", "regions"),
    [
        ("kv_producer", "auto", 1),
        ("kv_consumer", "auto", 1),
        ("kv_both", "auto", 2),
        ("kv_both", "pack", 1),
        ("kv_consumer", "pack", 0),
    ],
)
def test_registered_memory_is_each_storage_once_and_all_staging_together_within_its_setting(
    role: str, path: str, regions: int, staging_bytes: int
) -> None:
    with engine(role, TWO, transport=Registry, staging_bytes=staging_bytes, path=path) as made:
        for rank, transport in zip(made.ranks, made.transports, strict=True):
            kept = (int(rank.memory.ctypes.data), rank.memory.nbytes)
            assert transport.ranges.count(kept) == 1
            staging = [num_bytes for address, num_bytes in transport.ranges if (address, num_bytes) != kept]
            assert len(staging) == regions
            assert sum(staging) <= staging_bytes


@pytest.mark.parametrize(
    ("gathers", "receives", "shares"),
    [(True, False, (9, 0)), (False, True, (0, 9)), (True, True, (4, 4)), (False, False, (0, 0))],
)
def test_a_rank_of_both_roles_uses_half_of_the_setting_for_each(
    gathers: bool, receives: bool, shares: tuple[int, int]
) -> None:
    assert staging_shares(9, gathers=gathers, receives=receives) == shares


def test_the_setting_is_256_mib_unless_it_is_given() -> None:
    assert ConnectorConfig().staging_bytes == 256 << 20


@pytest.mark.parametrize("path", ["pack", "scatter"])
def test_a_long_prompt_is_moved_through_as_little_staging_memory_as_a_short_one(path: str) -> None:
    blocks, staging_bytes = 1024, 1 << 20
    table = list(range(1, blocks + 1))
    options = {"num_blocks": blocks + 1, "entry_bytes": 256, "path": path, "staging_bytes": staging_bytes}
    with (
        engine("kv_producer", ONE, transport=Registry, **options) as p,
        engine("kv_consumer", ONE, transport=Registry, **options) as d,
    ):
        held = Hold("long", "long", tuple(table), blocks * 16, prompt(blocks * 16), "")
        p.start(StepWork(holds=[held]))
        d.load("long", blocks * 16, table, p.origin, p.engine_id)
        assert d.received("long", 60) == ([None], set())
        assert (d.counters[0].take() or {})["bytes_received"] == 8 * staging_bytes
        (sender,) = (worker._prefill._sender for worker in p.workers)
        assert sender._writer.staging_bytes <= staging_bytes
        assert sum(size for _, size in p.transports[0].ranges) <= p.ranks[0].memory.nbytes + staging_bytes
        assert sum(size for _, size in d.transports[0].ranges) <= d.ranks[0].memory.nbytes + staging_bytes
