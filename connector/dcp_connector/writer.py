"""The three ways to write a pull: from page to page, out of staging memory into pages, or into decode's staging memory.

While a batch is in flight the next one is planned and gathered, into the other half of a thread's staging memory.
"""

from __future__ import annotations

import queue
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from dcp_connector.bind import Copies, bind_layers, split_batches
from dcp_connector.chunks import staged
from dcp_connector.errors import PeerError, Reason, StartupError
from dcp_connector.packing import pack_chunks
from dcp_connector.paths import CHUNK_BYTES
from dcp_connector.pipe import Pipe, Wire
from dcp_connector.staging import Staging
from dcp_connector.wire import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from dcp_connector.config import ConnectorConfig
    from dcp_connector.delivery import Delivery
    from dcp_connector.pulls import WritePlan
    from dcp_connector.stats import Counters
    from dcp_connector.tensors import LayerTensor
    from dcp_connector.transfer import Transport
    from dcp_connector.wire import Grant

#: One half of a thread's staging memory is written while the other is filled.
_HALVES = 2


class Writer:
    """Staging memory of a prefill rank and the threads that wait for its TransferEngine.

    Everything that writes raises PeerError for a pull that must not go on, TransferError for a failed batch, and
    BindError before an address outside a page is formed. Then nothing is in flight.
    """

    def __init__(
        self,
        transport: Transport,
        layers: tuple[LayerTensor, ...],
        config: ConnectorConfig,
        staging_bytes: int,
        counters: Counters,
    ) -> None:
        """Allocate and register staging memory, `staging_bytes` at most. Raises StartupError."""
        self._transport = transport
        self._config = config
        self._counters = counters
        self._wire = Wire(config.transfer_threads)
        self._staging = _staging(layers, config, staging_bytes)
        transport.register(self._staging.base, self._staging.num_bytes)
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(config.transfer_threads):
            self._slots.put(slot)

    @property
    def chunk_bytes(self) -> int:
        """Bytes that are gathered at once at most."""
        return self._staging.slot_bytes

    @property
    def staging_bytes(self) -> int:
        """Registered staging memory."""
        return self._staging.num_bytes

    def close(self) -> None:
        """Wait for what is in flight."""
        self._wire.close()

    def direct(self, delivery: Delivery, plan: WritePlan) -> int:
        """Write page to page; return the bytes."""
        copies = bind_layers(plan.runs, plan.src_table, plan.dst_table, plan.pages, plan.src_heads, plan.dst_heads)
        sent = 0
        with Pipe(self._wire) as pipe:
            for batch in split_batches(copies, self._config.max_batch_descriptors, self._config.max_batch_bytes):
                self._push(pipe, delivery, batch)
                sent += batch.total_bytes
        return sent

    def pack(self, delivery: Delivery, plan: WritePlan) -> int:
        """Gather decode's page images and write them; return the bytes."""
        sent = 0
        with self._halves() as halves, Pipe(self._wire) as pipe:
            chunks = pack_chunks(
                plan.runs,
                plan.src_table,
                plan.dst_table,
                plan.pages,
                plan.src_heads,
                plan.dst_heads,
                staging_bytes=self.chunk_bytes,
                max_descriptors=self._config.max_batch_descriptors,
            )
            for number, chunk in enumerate(chunks):
                half = halves[number % _HALVES]
                self._staging.gather(half, chunk.gathers, plan.src_pages)
                base = self._staging.address(half)
                self._push(pipe, delivery, Copies(chunk.staging_offset + base, chunk.dst, chunk.length))
                sent += chunk.num_bytes
        return sent

    def scatter(
        self, delivery: Delivery, plan: WritePlan, grant: Grant, tell: Callable[[Chunk], None]
    ) -> Generator[None, None, int]:
        """Fill decode's slots as it empties them, and return the bytes.

        Yields to wait for decode, with nothing in flight and no staging memory held.
        """
        if grant.chunk_bytes > self.chunk_bytes:
            detail = f"decode granted chunks of {grant.chunk_bytes} bytes; wanted were {self.chunk_bytes} at most"
            raise PeerError(Reason.OUT_OF_BOUNDS, detail)
        chunks, entries = plan.chunks(grant.chunk_bytes), plan.entries()
        delivery.open(len(chunks), len(grant.slots))
        while True:
            with self._halves() as halves, Pipe(self._wire) as pipe:
                while (turn := delivery.next_chunk()) is not None:
                    number, slot = turn
                    half, chunk = halves[number % _HALVES], chunks[number]
                    self._staging.gather(half, staged(chunk, entries), plan.src_pages)
                    copies = Copies.single(self._staging.address(half), grant.slots[slot], chunk.num_bytes)
                    self._push(pipe, delivery, copies, partial(tell, Chunk(delivery.write.pull.pull_id, number)))
                    delivery.wrote()
            if delivery.complete:
                return sum(chunk.num_bytes for chunk in chunks)
            yield
            delivery.check()

    @contextmanager
    def _halves(self) -> Generator[range]:
        """Hold one thread's staging memory: two slots of it."""
        pair, held_bytes = self._slots.get(), _HALVES * self.chunk_bytes
        self._counters.change("staging_bytes", held_bytes)
        try:
            yield range(_HALVES * pair, _HALVES * (pair + 1))
        finally:
            self._counters.change("staging_bytes", -held_bytes)
            self._slots.put(pair)

    def _push(self, pipe: Pipe, delivery: Delivery, batch: Copies, then: Callable[[], None] = lambda: None) -> None:
        """Write one batch when the one before is over, unless the pull must not go on; `then` follows the write."""
        segment = delivery.write.pull.segment
        addresses = batch.src.tolist(), batch.dst.tolist(), batch.length.tolist()

        def write() -> None:
            self._transport.write(segment, *addresses)
            self._counters.add("descriptors", len(batch))
            then()

        pipe.drain()
        delivery.check()
        pipe.push(write)


def _staging(layers: tuple[LayerTensor, ...], config: ConnectorConfig, staging_bytes: int) -> Staging:
    """Return two halves for each thread. Raises StartupError when one couldn't hold a token of a head."""
    threads, limit = config.transfer_threads, CHUNK_BYTES[config.mooncake_protocol]
    half_bytes = min(limit, config.max_batch_bytes, staging_bytes // (_HALVES * threads))
    needed = max(layer.page.entry_bytes for layer in layers)
    if half_bytes < needed:
        raise StartupError(
            f"staging_bytes {config.staging_bytes} gives this rank {staging_bytes} to gather rows in, so two halves of "
            f"{half_bytes} bytes to each of {threads} threads, and one token of one head has {needed}: raise "
            "staging_bytes or lower transfer_threads"
        )
    return Staging([layer.tensor for layer in layers], half_bytes, _HALVES * threads, config.staging_memory)
