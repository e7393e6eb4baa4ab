"""Both sides of a transfer in this process: the product's workers, sockets and threads over plain memory.

Only two things are stood in for: torch's tensors, by numpy arrays that answer the same questions, and the
TransferEngine, by a memory copy within the process.
"""

from __future__ import annotations

import ctypes
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcp_connector.bootstrap import BootstrapServer
from dcp_connector.config import ConnectorConfig
from dcp_connector.errors import Reason
from dcp_connector.handshake import SideFacts, assemble, wire_layout
from dcp_connector.health import RankWatch
from dcp_connector.requests_decode import Load
from dcp_connector.requests_prefill import Hold
from dcp_connector.stats import Counters
from dcp_connector.wire import Secret, token_digest
from dcp_connector.work import RankReport, StepWork
from dcp_connector.worker import WorkerSide
from tests.support.kv_oracle import HEAD_MAJOR, Physical, Rank, Sizes

HOST = "127.0.0.1"
SECRET = b"the secret of these tests"


class ArrayStorage:
    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def data_ptr(self) -> int:
        return int(self._memory.ctypes.data)

    def nbytes(self) -> int:
        return self._memory.nbytes


class ArrayTensor:
    """A view of a byte arena that answers what is asked of a torch tensor."""

    is_cuda = False
    device = "cpu"

    def __init__(self, memory: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._memory, self._offset, self._strides = memory, offset, strides
        self.shape = shape

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return int(self._memory.ctypes.data) + self._offset

    def element_size(self) -> int:
        return 1

    def untyped_storage(self) -> ArrayStorage:
        return ArrayStorage(self._memory)


class MemoryTransport:
    """Copies within the process. `before_write` may wait, or raise TransferError."""

    def __init__(self, before_write: Callable[[], None] = lambda: None) -> None:
        self.segment = f"memory-{uuid.uuid4().hex[:8]}"
        self.before_write = before_write
        self.batches: list[int] = []

    def register(self, address: int, num_bytes: int) -> None:
        assert num_bytes > 0

    def write(self, segment: str, src: Sequence[int], dst: Sequence[int], length: Sequence[int]) -> None:
        self.before_write()
        self.batches.append(len(length))
        for source, target, size in zip(src, dst, length, strict=True):
            ctypes.memmove(target, source, size)


@dataclass
class Engine:
    """One side: ranks, their memory, and for prefill the bootstrap server."""

    sizes: Sizes
    engine_id: str
    ranks: list[Rank]
    workers: list[WorkerSide]
    counters: list[Counters]
    transports: list[MemoryTransport]
    bootstrap: BootstrapServer
    unclear: Counter[str] = field(default_factory=Counter)
    #: ranks that have reported a request unclear, whether or not they have cleared it since
    ever_unclear: Counter[str] = field(default_factory=Counter)

    @property
    def origin(self) -> str:
        return f"http://{HOST}:{self.bootstrap.port}"

    def start(self, work: StepWork) -> None:
        for worker in self.workers:
            worker.start(work)

    def hold(self, transfer_id: str, num_tokens: int, table: Sequence[int]) -> None:
        for rank in self.ranks:
            rank.fill(rank.memory, list(table), 0, num_tokens)
        self.start(StepWork(holds=[Hold(transfer_id, transfer_id, tuple(table), num_tokens, prompt(num_tokens), "")]))

    def load(self, transfer_id: str, end: int, table: Sequence[int], origin: str, engine_id: str | None) -> None:
        digest = token_digest(prompt(end), "")
        self.start(StepWork(loads=[Load(transfer_id, transfer_id, origin, engine_id, tuple(table), 0, end, digest)]))

    def received(self, request_id: str, timeout_s: float = 10.0) -> tuple[list[Reason | None], set[int]]:
        """Wait until every rank has reported the request; return each rank's reason and the failed blocks.

        Requests that failed with blocks that may still be written to are in `unclear` until all ranks cleared them.
        """
        found: dict[int, Reason | None] = {}
        failed: set[int] = set()

        def look() -> bool:
            for number, worker in enumerate(self.workers):
                _, ids = worker.finished()
                failed.update(worker.take_failed_blocks())
                report = self.note(worker)
                if ids:
                    assert ids == {request_id}
                    assert number not in found, "reported twice"
                    found[number] = report.received[request_id]
            return len(found) == len(self.workers)

        wait_for(look, timeout_s, f"{request_id} was not reported by all ranks: {found}")
        return [found[number] for number in range(len(self.workers))], failed

    def note(self, worker: WorkerSide) -> RankReport:
        """Take a rank's report, and keep what it says of blocks that may still be written to."""
        failed, report = worker.take_failed_requests(), worker.take_report() or RankReport()
        assert failed == set(report.unclear), "a request with unclear blocks needs others"
        for request_id in report.unclear:
            self.unclear[request_id] += 1
            self.ever_unclear[request_id] += 1
        for request_id in report.cleared:
            assert self.unclear[request_id] > 0, "cleared without being unclear"
            self.unclear[request_id] -= 1
        self.unclear = +self.unclear
        return report

    def cleared(self, request_id: str, timeout_s: float = 10.0) -> None:
        """Wait until no rank expects writes into the blocks of a request that failed."""

        def look() -> bool:
            for worker in self.workers:
                assert worker.finished() == (set(), set())
                self.note(worker)
            return not self.unclear[request_id]

        wait_for(look, timeout_s, f"the blocks of {request_id} were not cleared: {self.unclear}")

    def sent(self, request_id: str, timeout_s: float = 10.0) -> list[Reason | None]:
        """Wait until every rank has given the request's blocks back; return each rank's reason."""
        found: dict[int, Reason | None] = {}

        def look() -> bool:
            for number, worker in enumerate(self.workers):
                ids, _ = worker.finished()
                if ids:
                    assert ids == {request_id}
                    assert number not in found, "reported twice"
                    report = worker.take_report()
                    assert report
                    found[number] = report.sent[request_id]
            return len(found) == len(self.workers)

        wait_for(look, timeout_s, f"{request_id} was not given back by all ranks: {found}")
        return [found[number] for number in range(len(self.workers))]

    def differing_bytes(self, before: list[np.ndarray], table: Sequence[int], end: int) -> list[int]:
        """Count, per rank, bytes that are not what they should be after tokens [0, end) arrived."""
        counts = []
        for rank, old in zip(self.ranks, before, strict=True):
            expected = old.copy()
            rank.fill(expected, list(table), 0, end)
            counts.append(int((rank.memory != expected).sum()))
        return counts

    def snapshot(self) -> list[np.ndarray]:
        return [rank.memory.copy() for rank in self.ranks]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.bootstrap.close()


def prompt(num_tokens: int) -> bytes:
    return np.arange(num_tokens, dtype="<i4").tobytes()


def wait_for(condition: Callable[[], bool], timeout_s: float, words: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, words
        time.sleep(0.002)


@contextmanager
def engine(
    role: str,
    sizes: Sizes,
    *,
    num_blocks: int = 24,
    transport: Callable[[], MemoryTransport] = MemoryTransport,
    secret: Secret = SECRET,
    facts: dict[str, Any] | None = None,
    physical: Physical = HEAD_MAJOR,
    port: int = 0,
    stages: int = 1,
    entry_bytes: int = 16,
    tensors: Callable[[Rank], dict[str, Any]] | None = None,
    **config: Any,
) -> Iterator[Engine]:
    """Run one side for the length of a block; `role` is "kv_producer" or "kv_consumer".

    With two `stages` of pipeline parallelism each rank has one of the two layers. `tensors` makes what is registered
    for a rank; by default views of its memory.
    """
    options = ConnectorConfig(**{"mooncake_protocol": "tcp", "staging_bytes": 4 << 20, **config})
    values: dict[str, Any] = {
        "engine_id": f"{role}-{uuid.uuid4().hex[:8]}",
        "role": role,
        "model_hash": "same",
        "model": "tiny",
        "kv_dtype": "uint8",
        "page_format": "rows",
        "layout": wire_layout(sizes.layout()),
        "pipeline_parallel_size": stages,
    }
    side = SideFacts(**{**values, **(facts or {})})
    made = Engine(sizes, side.engine_id, [], [], [], [], BootstrapServer(port, 1, secret, serves_query=True))
    try:
        for index in range(sizes.t * stages):
            stage, number = divmod(index, sizes.t)
            layers = 2 // stages
            made.ranks.append(Rank(sizes, number, 0, num_blocks, layers, entry_bytes, physical, stage * layers))
            made.counters.append(Counters())
            made.transports.append(transport())
            worker = WorkerSide(
                host=HOST,
                tp_rank=number,
                pp_rank=stage,
                num_blocks=num_blocks,
                read_facts=lambda _names: side,
                open_transport=lambda index=index: made.transports[index],
                config=options,
                secret=secret,
                counters=made.counters[index],
            )
            made.workers.append(worker)
            worker.register((tensors or tensors_of)(made.ranks[index]))
        reported = [worker.facts for worker in made.workers if worker.facts]
        watch = RankWatch({f"rank {number}": each.health for number, each in enumerate(reported)})
        made.bootstrap.publish(assemble(uuid.uuid4().hex, reported), watch.problems, watch.failures)
        yield made
    finally:
        made.close()


def tensors_of(rank: Rank) -> dict[str, ArrayTensor]:
    """One view per layer of the rank's arena."""
    found: dict[str, ArrayTensor] = {}
    for number, page in enumerate(rank.pages):
        shape = (page.num_blocks, page.num_heads, page.kernel_block_size, page.entry_bytes)
        strides = (page.block_stride, page.head_stride, page.row_stride, 1)
        found[f"layer.{rank.first_layer + number}"] = ArrayTensor(rank.memory, page.base - rank.address, shape, strides)
    return found
