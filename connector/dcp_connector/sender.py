"""Serves pulls: queue, plan, choose the path, report. `writer` moves the bytes.

Each peer (TransferEngine segment) has a lane and at most one batch in flight: concurrent batches to one peer gain
nothing over TCP and are not safe over RDMA (vLLM issue 44238). A pull on the scatter path that waits for decode holds
neither a thread nor staging memory.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from dcp_connector.delivery import Delivery
from dcp_connector.errors import PeerError, Reason
from dcp_connector.lanes import Lanes
from dcp_connector.pages import BindError
from dcp_connector.paths import Path, choose_path
from dcp_connector.pulls import WritePlan, plan_write, real_fragments, typical_fragments
from dcp_connector.requests_prefill import Write, Written
from dcp_connector.transfer import STRAGGLERS_S, TransferError, Transport
from dcp_connector.units import LayoutError
from dcp_connector.wire import Chunk, Grant, Taken, Want
from dcp_connector.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from dcp_connector.config import ConnectorConfig
    from dcp_connector.geometry import SideLayout
    from dcp_connector.paths import Fragments
    from dcp_connector.stats import Counters
    from dcp_connector.tensors import Fence, LayerTensor

logger = logging.getLogger(__name__)

#: Peers whose path was logged; beyond it they are logged again.
_MAX_ANNOUNCED = 4096


class Sender:
    """Executes writes of one prefill rank, with `staging_bytes` of staging memory at most.

    Raises StartupError when it can't be had.
    `report(transfer_id, pull_id, written)` and `tell(peer, message)` are called from threads of the sender, in the
    order in which things happened.
    """

    def __init__(
        self,
        transport: Transport,
        layers: tuple[LayerTensor, ...],
        side: SideLayout,
        tp_rank: int,
        config: ConnectorConfig,
        staging_bytes: int,
        counters: Counters,
        report: Callable[[str, str, Written], None],
        tell: Callable[[bytes, Want | Chunk], None],
        *,
        whole_pages: bool,
    ) -> None:
        self._pages = {layer.name: layer.page for layer in layers}
        self._side = side
        self._tp_rank = tp_rank
        self._config = config
        self._counters = counters
        self._report = report
        self._tell = tell
        self._whole_pages = whole_pages
        self._writer = Writer(transport, layers, config, staging_bytes, counters)
        self._lanes = Lanes(config.transfer_threads, "dcp-send")
        self._lock = threading.Lock()
        self._deliveries: dict[str, Delivery] = {}
        self._announced: set[tuple[str, str, Path]] = set()

    def submit(self, write: Write, fence: Fence | None) -> None:
        """Queue a write behind the others for the same peer."""
        delivery = Delivery(write, fence, self._advance)
        with self._lock:
            self._deliveries[write.pull.pull_id] = delivery
        self._lanes.add(delivery)

    def halt(self, pull_id: str) -> None:
        """Let a write stop before its next batch; it is reported as cancelled."""
        delivery = self._find(pull_id)
        if delivery is not None:
            delivery.halt()
            self._lanes.wake(delivery)

    def granted(self, grant: Grant) -> None:
        """Decode says where chunks of a pull may go. Only the first answer to a pull that isn't over counts."""
        delivery = self._find(grant.pull_id)
        if delivery is not None and delivery.granted(grant):
            self._lanes.wake(delivery)

    def taken(self, message: Taken) -> None:
        """Decode has read a chunk."""
        delivery = self._find(message.pull_id)
        if delivery is not None and delivery.taken(message.number):
            self._lanes.wake(delivery)

    def next_timer(self) -> float | None:
        """Return the earliest deadline of a pull that waits for decode, or None."""
        return min((delivery.write.deadline for delivery in self._waiting()), default=None)

    def tick(self, now: float) -> None:
        """Let pulls that wait for decode fail at their deadline. Call at `next_timer` or later."""
        for delivery in self._waiting():
            if delivery.write.deadline <= now:
                self._lanes.wake(delivery)

    def close(self) -> None:
        """Stop taking work; a batch in flight is waited for."""
        self._lanes.close()
        self._writer.close()

    def _find(self, pull_id: str) -> Delivery | None:
        with self._lock:
            return self._deliveries.get(pull_id)

    def _waiting(self) -> list[Delivery]:
        return [job for job in self._lanes.parked() if isinstance(job, Delivery)]

    def _advance(self, delivery: Delivery) -> bool:
        """Give a delivery a turn. Return whether it is over; then it was reported."""
        pull = delivery.write.pull
        try:
            if delivery.steps is None:
                delivery.steps = self._steps(delivery)
            next(delivery.steps)
        except StopIteration as end:
            result = Written(end.value)
        except PeerError as error:
            result = Written(0, error)
        except BindError as error:
            result = Written(0, PeerError(Reason.OUT_OF_BOUNDS, str(error)))
        except LayoutError as error:
            result = Written(0, PeerError(Reason.INCOMPATIBLE, str(error)))
        except TransferError as error:
            # Parts of the batch may still be under way: decode is told how long to keep its blocks out of use.
            result = Written(0, PeerError(Reason.TRANSFER_ERROR, str(error)), STRAGGLERS_S)
        except Exception as error:
            logger.exception("dcp: writing for %s failed unexpectedly", pull.pull_id)
            result = Written(0, PeerError(Reason.INTERNAL, f"{type(error).__name__}: {error}"))
        else:
            return False
        with self._lock:
            del self._deliveries[pull.pull_id]
        if result.num_bytes:
            self._counters.add("bytes_sent", result.num_bytes)
            self._counters.add("paths", 1, delivery.path)
            self._counters.sample("write_seconds", time.monotonic() - delivery.started)
        self._report(pull.transfer_id, pull.pull_id, result)
        return True

    def _steps(self, delivery: Delivery) -> Generator[None, None, int]:
        """Write a pull and return its bytes; yields whenever it waits for decode. Raises what `_advance` catches."""
        write = delivery.write
        plan = plan_write(
            write.pull, write.hold.block_ids, self._pages, self._side, self._tp_rank, whole_pages=self._whole_pages
        )
        if delivery.fence is not None:
            delivery.fence.synchronize()
        delivery.started = time.monotonic()
        if not plan.pages or not len(plan.runs):
            return 0
        delivery.path = self._choose(write, plan)
        if delivery.path == "scatter":
            self._tell(write.peer, Want(write.pull.pull_id, self._writer.chunk_bytes))
            while (grant := delivery.grant) is None:
                yield
                delivery.check()
            if grant.slots:
                return (yield from self._writer.scatter(delivery, plan, grant, partial(self._tell, write.peer)))
            delivery.path = self._choose(write, plan, can_scatter=False)
        return self._writer.pack(delivery, plan) if delivery.path == "pack" else self._writer.direct(delivery, plan)

    def _choose(self, write: Write, plan: WritePlan, *, can_scatter: bool = True) -> Path:
        if self._whole_pages:
            return "direct"
        transport, override = self._config.mooncake_protocol, self._config.path
        fragments = typical_fragments(plan)
        path = choose_path(fragments, transport, override, can_scatter=can_scatter)
        if path != "pack" and override == "auto":
            # This request's blocks may be neighbours, and its fragments larger than they typically are.
            fragments = real_fragments(plan)
            path = choose_path(fragments, transport, can_scatter=can_scatter)
        self._announce(write, path, fragments)
        return path

    def _announce(self, write: Write, path: Path, fragments: Fragments) -> None:
        """Say once per peer and path that it is taken and why."""
        key = write.pull.segment, write.pull.decode_engine, path
        with self._lock:
            if key in self._announced:
                return
            if len(self._announced) >= _MAX_ANNOUNCED:
                self._announced.clear()
            self._announced.add(key)
        logger.info(
            "dcp: writing to %s (engine %s) by the %s path; mean fragment %.0f bytes direct, %.0f packed",
            *key,
            fragments.direct_bytes,
            fragments.packed_bytes,
        )
