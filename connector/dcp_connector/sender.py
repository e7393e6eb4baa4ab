"""Writes what decode ranks ask for: plan, choose the path, move batches, report.

A small pool of threads works for all peers. Each peer (TransferEngine segment) has a queue of its own and at most one
batch in flight: concurrent batches to one peer gain nothing over TCP and are not safe over RDMA (vLLM issue 44238).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from dcp_connector.bind import Copies, bind, bind_layers, split_batches
from dcp_connector.errors import PeerError, Reason, StartupError
from dcp_connector.geometry import SideLayout
from dcp_connector.handshake import page_layout, side_layout
from dcp_connector.mapping import Runs, plan_runs, sources
from dcp_connector.packing import pack_chunks, plan_image
from dcp_connector.pages import BindError
from dcp_connector.paths import Fragments, choose_path, mean_fragments
from dcp_connector.requests_prefill import Write, Written
from dcp_connector.tensors import Fence, LayerTensor, Staging
from dcp_connector.transfer import TransferError, Transport
from dcp_connector.units import LayoutError, LocalHead, cdiv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcp_connector.config import ConnectorConfig
    from dcp_connector.geometry import PageLayout
    from dcp_connector.stats import Counters

logger = logging.getLogger(__name__)

#: Peers whose path was logged; beyond it they are logged again.
_MAX_ANNOUNCED = 4096


@dataclass(frozen=True, slots=True)
class _Job:
    write: Write
    fence: Fence | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that is the same for all batches of one pull."""

    runs: Runs
    src_table: Sequence[int]
    dst_table: Sequence[int]
    layers: tuple[int, ...]
    pages: tuple[tuple[PageLayout, PageLayout], ...]
    src_heads: tuple[LocalHead, ...]
    dst_heads: tuple[LocalHead, ...]
    path: Literal["direct", "pack"]


class Sender:
    """Executes writes of one prefill rank. `report(transfer_id, pull_id, written)` is called from a pool thread."""

    def __init__(
        self,
        transport: Transport,
        layers: tuple[LayerTensor, ...],
        side: SideLayout,
        tp_rank: int,
        config: ConnectorConfig,
        counters: Counters,
        report: Callable[[str, str, Written], None],
        *,
        whole_pages: bool,
    ) -> None:
        self._transport = transport
        self._layers = layers
        self._index = {layer.name: i for i, layer in enumerate(layers)}
        self._side = side
        self._tp_rank = tp_rank
        self._config = config
        self._counters = counters
        self._report = report
        self._whole_pages = whole_pages
        self._staging: Staging | None = None
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(config.transfer_threads, thread_name_prefix="dcp-send")
        self._lock = threading.Lock()
        self._queues: dict[str, deque[_Job]] = {}
        self._active: set[str] = set()
        self._halted: set[str] = set()
        self._announced: set[tuple[str, str]] = set()

    def prepare(self) -> None:
        """Allocate and register staging memory. Called once, before the first write. Raises StartupError."""
        num_slots = self._config.transfer_threads
        slot_bytes, needed = self._config.staging_bytes // num_slots, max(x.page.entry_bytes for x in self._layers)
        if slot_bytes < needed:
            raise StartupError(
                f"staging_bytes {self._config.staging_bytes} leaves {slot_bytes} bytes to each of {num_slots} threads, "
                f"and one token of one head has {needed}: raise staging_bytes or lower transfer_threads"
            )
        staging = Staging(self._layers, slot_bytes, num_slots)
        self._transport.register(staging.base, staging.num_bytes)
        for slot in range(num_slots):
            self._slots.put(slot)
        self._staging = staging

    def submit(self, write: Write, fence: Fence | None) -> None:
        """Queue a write behind the others for the same peer."""
        segment = write.pull.segment
        with self._lock:
            self._active.add(write.pull.pull_id)
            waiting = self._queues.get(segment)
            if waiting is not None:
                waiting.append(_Job(write, fence))
                return
            self._queues[segment] = deque([_Job(write, fence)])
        self._pool.submit(self._work, segment)

    def halt(self, pull_id: str) -> None:
        """Let a write stop before its next batch; it is reported as cancelled."""
        with self._lock:
            if pull_id in self._active:
                self._halted.add(pull_id)

    def close(self) -> None:
        """Stop taking work; a batch in flight is waited for."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _work(self, segment: str) -> None:
        """Do one job of a peer, then queue up again behind the other peers."""
        with self._lock:
            job = self._queues[segment].popleft()
        pull = job.write.pull
        result = self._attempt(job)
        with self._lock:
            self._active.discard(pull.pull_id)
            self._halted.discard(pull.pull_id)
            more = bool(self._queues[segment])
            if not more:
                del self._queues[segment]
        self._report(pull.transfer_id, pull.pull_id, result)
        if more:
            self._pool.submit(self._work, segment)

    def _attempt(self, job: _Job) -> Written:
        pull = job.write.pull
        try:
            plan = self._plan(job.write)
            if job.fence is not None:
                job.fence.synchronize()
            move = self._pack if plan.path == "pack" else self._direct
            num_bytes = move(plan, job.write) if len(plan.runs) else 0
        except PeerError as error:
            return Written(0, error)
        except BindError as error:
            return Written(0, PeerError(Reason.OUT_OF_BOUNDS, str(error)))
        except LayoutError as error:
            return Written(0, PeerError(Reason.INCOMPATIBLE, str(error)))
        except TransferError as error:
            # Give stragglers time before decode is told that nothing is in flight.
            time.sleep(self._config.cancel_grace_s)
            return Written(0, PeerError(Reason.TRANSFER_ERROR, str(error)))
        except Exception as error:
            logger.exception("dcp: writing for %s failed unexpectedly", pull.pull_id)
            return Written(0, PeerError(Reason.INTERNAL, f"{type(error).__name__}: {error}"))
        if num_bytes:
            self._counters.add("bytes_sent", num_bytes)
            self._counters.add("paths", 1, plan.path)
        return Written(num_bytes)

    def _plan(self, write: Write) -> _Plan:
        pull, hold = write.pull, write.hold
        decode = side_layout(pull.layout)
        mine = next(
            (
                s
                for s in sources(self._side, decode, pull.decode_rank, pull.transfer_id)
                if s.prefill_rank == self._tp_rank
            ),
            None,
        )
        if mine is None:
            raise PeerError(
                Reason.INCOMPATIBLE, f"prefill rank {self._tp_rank} is no source of rank {pull.decode_rank}"
            )
        unknown = sorted(pull.pages.keys() - self._index.keys())
        if unknown or not pull.pages:
            raise PeerError(
                Reason.INCOMPATIBLE,
                f"decode asks for {len(pull.pages)} layers, of which prefill rank {self._tp_rank} doesn't have "
                f"{unknown[:4]}",
            )
        layers = tuple(self._index[name] for name in pull.pages)
        pages = tuple((self._layers[i].page, page_layout(pull.pages[self._layers[i].name], decode)) for i in layers)
        src_heads = self._side.local_heads(self._tp_rank, mine.heads)
        dst_heads = decode.local_heads(pull.decode_rank, mine.heads)
        shard = decode.shard_of_rank(pull.decode_rank)
        end = pull.end
        if self._whole_pages:
            end = cdiv(end, decode.virtual_block_size) * decode.virtual_block_size
        runs = plan_runs(self._side, decode, mine.prefill_shard, shard, pull.start, end)
        dst_table = np.frombuffer(pull.block_table, dtype="<i8").tolist()
        plan = _Plan(runs, hold.block_ids, dst_table, layers, pages, src_heads, dst_heads, "direct")
        if self._whole_pages or not pages or not len(runs):
            return plan
        typical = mean_fragments(self._side, decode, mine.prefill_shard, shard, *pages[0], src_heads, dst_heads)
        path = choose_path(typical, self._config.mooncake_protocol, self._config.path)
        if path == "direct" and self._config.path == "auto":
            # With blocks that are scattered, packing would gain nothing. This request's may be neighbours.
            path = choose_path(_fragments(plan), self._config.mooncake_protocol)
        self._announce(pull.segment, pull.decode_engine, path, typical)
        return replace(plan, path=path)

    def _announce(self, segment: str, engine: str, path: str, typical: Fragments) -> None:
        """Say once per peer which path it gets and why."""
        if (segment, engine) not in self._announced:
            if len(self._announced) >= _MAX_ANNOUNCED:
                self._announced.clear()
            self._announced.add((segment, engine))
            logger.info(
                "dcp: writing to %s (engine %s) by the %s path; mean fragment %.0f bytes direct, %.0f packed",
                segment,
                engine,
                path,
                typical.direct_bytes,
                typical.packed_bytes,
            )

    def _direct(self, plan: _Plan, write: Write) -> int:
        copies = bind_layers(plan.runs, plan.src_table, plan.dst_table, plan.pages, plan.src_heads, plan.dst_heads)
        sent = 0
        for batch in split_batches(copies, self._config.max_batch_descriptors, self._config.max_batch_bytes):
            sent += self._write(write, batch)
        return sent

    def _pack(self, plan: _Plan, write: Write) -> int:
        staging = self._staging
        assert staging is not None, "prepare() comes before the first write"
        sent = 0
        slot = self._slots.get()
        try:
            chunks = pack_chunks(
                plan.runs,
                plan.src_table,
                plan.dst_table,
                plan.pages,
                plan.src_heads,
                plan.dst_heads,
                staging_bytes=min(staging.slot_bytes, self._config.max_batch_bytes),
                max_descriptors=self._config.max_batch_descriptors,
            )
            base = staging.base + staging.offset(slot)
            for chunk in chunks:
                staging.gather(slot, chunk.gathers, plan.layers)
                sent += self._write(write, Copies(chunk.staging_offset + base, chunk.dst, chunk.length))
        finally:
            self._slots.put(slot)
        return sent

    def _write(self, write: Write, batch: Copies) -> int:
        """Write one batch, unless the asker has given up or its deadline has passed."""
        pull = write.pull
        with self._lock:
            halted = pull.pull_id in self._halted
        if halted:
            raise PeerError(Reason.CANCELLED, "decode gave the pull up")
        if time.monotonic() >= write.deadline:
            raise PeerError(Reason.DEADLINE, "decode's deadline passed before everything was written")
        self._transport.write(pull.segment, batch.src.tolist(), batch.dst.tolist(), batch.length.tolist())
        self._counters.add("descriptors", len(batch))
        return batch.total_bytes


def _fragments(plan: _Plan) -> Fragments:
    """Return what one layer's descriptors are on either path, with the blocks that this request really has."""
    arguments = (plan.runs, plan.src_table, plan.dst_table, *plan.pages[0], plan.src_heads, plan.dst_heads)
    copies, image = bind(*arguments), plan_image(*arguments)
    return Fragments(copies.total_bytes / len(copies), image.num_bytes / len(image.length))
