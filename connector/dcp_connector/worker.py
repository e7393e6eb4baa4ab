"""The connector in a worker process: the prefill half, the decode half, or both.

Every method is called on the engine's thread, about a thousand times a second while requests wait, and never blocks.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from dcp_connector.config import staging_shares
from dcp_connector.decode_worker import DecodeWorker
from dcp_connector.errors import ConnectorError
from dcp_connector.failures import FailureLog
from dcp_connector.handshake import RankFacts, SideFacts, side_layout, wire_page
from dcp_connector.health import RankHealth, thread_problem
from dcp_connector.layers import Registered, flatten, read_layers, with_halves
from dcp_connector.paths import landing_slots
from dcp_connector.prefill_worker import PrefillWorker
from dcp_connector.requests_decode import Cleared
from dcp_connector.staging import Staging
from dcp_connector.tensors import Tensor, fence, storages
from dcp_connector.work import RankReport, StepWork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dcp_connector.config import ConnectorConfig
    from dcp_connector.stats import Counters, Data
    from dcp_connector.tensors import LayerTensor
    from dcp_connector.transfer import Transport
    from dcp_connector.wire import Secret

logger = logging.getLogger(__name__)


class WorkerSide:
    """One rank. Threads start in `register`; before it there is nothing to transfer.

    `read_facts(layer names)` is asked once, late, because vLLM settles the interleave after this object was made.
    """

    def __init__(
        self,
        *,
        host: str,
        tp_rank: int,
        pp_rank: int,
        num_blocks: int,
        read_facts: Callable[[tuple[str, ...]], SideFacts],
        open_transport: Callable[[], Transport],
        config: ConnectorConfig,
        secret: Secret,
        counters: Counters,
    ) -> None:
        self._host = host
        self._tp_rank = tp_rank
        self._pp_rank = pp_rank
        self._num_blocks = num_blocks
        self._read_facts = read_facts
        self._open_transport = open_transport
        self._config = config
        self._secret = secret
        self._counters = counters
        self._prefill: PrefillWorker | None = None
        self._decode: DecodeWorker | None = None
        self._some_tensor: Tensor | None = None
        self._transport: Transport | None = None
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._report = RankReport()
        self._virtual_block_size = 1
        self._health: RankHealth | None = None
        self._failures = FailureLog(time.time)
        self.facts: RankFacts | None = None

    def register(self, tensors: Mapping[str, Registered]) -> None:
        """Take the KV tensors over: describe, register with the TransferEngine, start. Raises StartupError in words."""
        facts = self._read_facts(tuple(tensors))
        side = side_layout(facts.layout)
        self._virtual_block_size = side.virtual_block_size
        self._counters.rank = self._pp_rank * side.tensor_parallel_size + self._tp_rank
        layers = read_layers(tensors, side, self._num_blocks)
        # Kept: peers reach the registered memory only while the TransferEngine lives.
        transport = self._transport = self._open_transport()
        for address, num_bytes in storages(flatten(tensors)):
            transport.register(address, num_bytes)
        self._some_tensor = layers[0].tensor
        # Whole pages need no staging memory to land in, and nor do pulls that a setting sends by another path.
        scatters = facts.page_format != "opaque" and self._config.path not in ("direct", "pack")
        gathering_bytes, receiving_bytes = staging_shares(
            self._config.staging_bytes,
            gathers=facts.role != "kv_consumer",
            receives=facts.role != "kv_producer" and scatters,
        )
        if facts.role != "kv_consumer":
            self._prefill = PrefillWorker(
                host=self._host,
                engine_id=facts.engine_id,
                tp_rank=self._tp_rank,
                pp_rank=self._pp_rank,
                side=side,
                layers=with_halves(layers, facts.key_bytes),
                whole_pages=facts.page_format == "opaque",
                transport=transport,
                config=self._config,
                staging_bytes=gathering_bytes,
                secret=self._secret,
                counters=self._counters,
            )
        self._health = RankHealth(self._host, self.problems, self._failures.entries)
        self.facts = RankFacts(
            side=facts,
            tp_rank=self._tp_rank,
            pp_rank=self._pp_rank,
            control=self._prefill.address if self._prefill else "",
            pages={layer.name: wire_page(layer.page) for layer in layers},
            health=self._health.address,
        )
        if facts.role != "kv_producer":
            self._decode = DecodeWorker(
                facts=self.facts,
                layout=side,
                segment=transport.segment,
                config=self._config,
                secret=self._secret,
                counters=self._counters,
                staging=self._landing_memory(transport, layers, receiving_bytes) if receiving_bytes else None,
                failures=self._failures,
            )
        logger.info(
            "dcp: rank tp %d pp %d is up: %s, %s pages, segment %s",
            self._tp_rank,
            self._pp_rank,
            facts.layout,
            facts.page_format,
            transport.segment,
        )

    def problems(self) -> list[str]:
        """Return what is wrong with this rank's threads, one line each. Any thread."""
        halves = (("prefill", self._prefill), ("decode", self._decode))
        found = (thread_problem(name, alive=half.alive, idle_s=half.idle_s) for name, half in halves if half)
        return [problem for problem in found if problem is not None]

    def _landing_memory(self, transport: Transport, layers: tuple[LayerTensor, ...], num_bytes: int) -> Staging:
        """Return registered memory that writers may put rows in, `num_bytes` at most."""
        tensors = [layer.tensor for layer in layers]
        slot_bytes, num_slots = landing_slots(num_bytes, self._config.mooncake_protocol)
        staging = Staging(tensors, slot_bytes, num_slots, self._config.staging_memory)
        transport.register(staging.base, staging.num_bytes)
        return staging

    def start(self, work: StepWork) -> None:
        """Begin what the scheduler decided in this step."""
        if self._prefill is not None:
            if work.holds:
                self._prefill.hold(work.holds, fence(_not_none(self._some_tensor)))
            self._prefill.drop(work.drops)
        if self._decode is not None:
            self._decode.load(work.loads)
            self._decode.abort(work.aborts)
            self._decode.release(work.releases)

    def finished(self) -> tuple[set[str], set[str]]:
        """Return requests whose sending and whose receiving is over on this rank, each exactly once.

        Raises ConnectorError when a thread of the connector has died: the engine must restart, because no request
        would ever end. Nothing that a peer sends can cause that.
        """
        for half in (self._prefill, self._decode):
            if half is not None and not half.alive:
                raise ConnectorError("a thread of the KV connector has died; the log says why. The engine must restart")
        sent: set[str] = set()
        received: set[str] = set()
        for item in self._prefill.take_sent() if self._prefill else ():
            sent.add(item.request_id)
            self._report.sent[item.request_id] = item.reason
        for over in self._decode.take_finished() if self._decode else ():
            request_id = over.load.request_id
            if isinstance(over, Cleared):
                self._report.cleared[request_id] = 1
                continue
            received.add(request_id)
            self._report.received[request_id] = over.reason
            if not over.confirmed:
                # The scheduler keeps its blocks out of use, so none of them may be computed into either.
                self._report.unclear[request_id] = 1
                self._failed_requests.add(request_id)
            elif over.reason is not None and not over.aborted:
                # From the first fetched block on nothing counts as computed. Earlier ones may be shared and are good.
                # 0 is vLLM's null block: it stands for no block, in any number of tables.
                fetched = over.load.block_ids[over.load.start // self._virtual_block_size :]
                self._failed_blocks.update(block for block in fetched if block)
        return sent, received

    def take_failed_requests(self) -> set[str]:
        """Return failed loads that need other blocks. Call after `finished`, in the same step."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks of loads that failed since the last call. Call after `finished`, in the same step."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> RankReport | None:
        """Return how requests ended since the last call."""
        report, self._report = self._report, RankReport()
        return None if report.is_empty() else report

    def take_stats(self) -> Data | None:
        """Return what was counted since the last call."""
        return self._counters.take()

    def close(self) -> None:
        """Stop all threads."""
        for half in (self._health, self._prefill, self._decode):
            if half is not None:
                half.close()


def _not_none(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "register() comes first"
    return tensor
