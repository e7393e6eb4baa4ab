"""`DCPMooncakeConnector`: what vLLM loads by name. It forwards, and decides nothing.

vLLM imports this module in the API server too: neither mooncake nor a GPU is touched before a worker registers its KV.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from dcp_connector import compat, startup
from dcp_connector._vllm import (
    CacheHitSource,
    KVConnectorBase,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from dcp_connector.bootstrap import BootstrapServer
from dcp_connector.handshake import RankFacts, assemble
from dcp_connector.health import RankWatch
from dcp_connector.prometheus import DCPPromMetrics, DCPStats
from dcp_connector.scheduler import Identity, Request, SchedulerSide
from dcp_connector.stats import Counters
from dcp_connector.transfer import MooncakeTransport
from dcp_connector.work import RankReport, StepWork
from dcp_connector.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcp_connector.tensors import Tensor


class StepMetadata(KVConnectorMetadata):
    """One step's work for the workers."""

    def __init__(self, work: StepWork) -> None:
        self.work = work


class Handshake(KVConnectorHandshakeMetadata):
    """One worker's facts for the bootstrap server."""

    def __init__(self, facts: RankFacts) -> None:
        self.facts = facts


class Report(KVConnectorWorkerMetadata):
    """How requests ended on a worker."""

    def __init__(self, report: RankReport) -> None:
        self.report = report

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both workers' reports as one."""
        if not isinstance(other, Report):
            return self
        return Report(self.report.merged(other.report))


class DCPMooncakeConnector(KVConnectorBase, SupportsHMA):
    """Moves KV between prefill and decode engines of any two valid layouts, over Mooncake's TransferEngine."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._counters = Counters()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._bootstrap: BootstrapServer | None = None
        #: where the health of the pod's other data-parallel ranks is asked for, on its first one
        self._siblings: dict[str, str] = {}
        compat.adopt_logging()
        with startup.explained():
            self._build(vllm_config, role, kv_cache_config)

    def _build(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Check everything and make the half that this process needs. Raises StartupError."""
        config = compat.read_config(vllm_config)
        compat.check_version(compat.vllm_version(), allow_unsupported=config.allow_unsupported_vllm)
        compat.check_supported(vllm_config, kv_cache_config)
        secret = compat.read_secret(os.environ)
        host = compat.host_address()
        if role is KVConnectorRole.SCHEDULER:
            producer, consumer = compat.roles(vllm_config)
            local_rank = compat.local_data_parallel_rank(vllm_config)
            port = config.bootstrap_port + local_rank
            if local_rank == 0:
                # The first one answers for the pod.
                others = range(1, compat.local_data_parallel_size(vllm_config))
                self._siblings = {f"data-parallel rank {number}": f"127.0.0.1:{port + number}" for number in others}
            self._bootstrap = BootstrapServer(
                port, config.api_port, secret, serves_query=producer, stalled_s=self._stalled_s
            )
            shown = f"[{host}]" if ":" in host else host
            self._scheduler = SchedulerSide(
                Identity(
                    engine_id=compat.engine_id(vllm_config),
                    bootstrap_addr=f"http://{shown}:{self._bootstrap.port}",
                    is_producer=producer,
                    is_consumer=consumer,
                    virtual_block_size=compat.virtual_block_size(vllm_config, kv_cache_config),
                    recomputes=compat.recomputes(vllm_config),
                ),
                self._counters,
                new_id=lambda: f"dcp-{uuid.uuid4()}",
                used_for_s=2 * config.lease_s,
            )
        else:
            tp_rank, pp_rank = compat.ranks()
            self._worker = WorkerSide(
                host=host,
                tp_rank=tp_rank,
                pp_rank=pp_rank,
                num_blocks=kv_cache_config.num_blocks,
                read_facts=lambda names: compat.side_facts(vllm_config, kv_cache_config, names),
                open_transport=lambda: MooncakeTransport(host, config.mooncake_protocol, config.device_name),
                config=config,
                secret=secret,
                counters=self._counters,
            )

    # The scheduler process.

    @property
    def _planner(self) -> SchedulerSide:
        assert self._scheduler is not None, "called on the worker's instance"
        return self._scheduler

    def _stalled_s(self) -> float:
        return self._scheduler.stalled_s if self._scheduler is not None else 0.0

    def on_new_request(self, request: Request) -> None:
        """See SchedulerSide.on_new_request."""
        self._planner.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """See SchedulerSide.matched_tokens."""
        return self._planner.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002 - vLLM's signature
        """The one group is always loaded."""
        return (0,)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """See SchedulerSide.allocated."""
        self._planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See SchedulerSide.bind_blocks."""
        self._planner.bind_blocks(gpu_block_pool)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """A step begins. See SchedulerSide.take_work."""
        self._planner.step_begins(compat.num_scheduled_tokens(scheduler_output))
        return StepMetadata(self._planner.take_work())

    def update_connector_output(self, connector_output: Any) -> None:
        """See SchedulerSide.settle."""
        meta = connector_output.kv_connector_worker_meta
        self._planner.settle(
            meta.report if isinstance(meta, Report) else None,
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
        )

    def take_events(self) -> tuple[()]:
        """A step has ended: vLLM asks once for each. There are no events of this connector."""
        self._planner.step_ended()
        return ()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerSide.finished."""
        return self._planner.finished(request, block_ids, handed_off=compat.finished_normally(request))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerSide.finished."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping until the workers have heard what came up."""
        return self._planner.has_work()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers are up: serve their addresses."""
        facts = [item.facts for item in metadata.values() if isinstance(item, Handshake)]
        assert self._bootstrap is not None, "called on the worker's instance"
        ranks = {f"rank tp {each.tp_rank} pp {each.pp_rank}": each.health for each in facts}
        watch = RankWatch(ranks | self._siblings)
        with startup.explained():
            self._bootstrap.publish(assemble(uuid.uuid4().hex, facts), watch.problems, watch.failures)

    # A worker process.

    @property
    def _rank(self) -> WorkerSide:
        assert self._worker is not None, "called on the scheduler's instance"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See WorkerSide.register."""
        with startup.explained():
            self._rank.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        """This worker's facts, for `set_xfer_handshake_metadata_pp_aware`."""
        return Handshake(self._rank.facts) if self._rank.facts else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """See WorkerSide.start."""
        self._rank.start(cast("StepMetadata", self._get_connector_metadata()).work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """KV is sent once the prompt is complete."""

    def wait_for_save(self) -> None:
        """Nothing is saved during a step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:  # noqa: ARG002
        """See WorkerSide.finished."""
        return self._rank.finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See WorkerSide.finished and take_failed_requests."""
        sent, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent, received, self._rank.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See WorkerSide.take_failed_blocks."""
        return self._rank.take_failed_blocks()

    def build_connector_worker_meta(self) -> Report | None:
        """See WorkerSide.take_report."""
        report = self._rank.take_report()
        return Report(report) if report else None

    # Both.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this process counted since the last call."""
        data = self._counters.take()
        return DCPStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Stats as they arrive in the front end."""
        return DCPStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Register the metrics of `stats.METRICS`."""
        return DCPPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM's signature
        """Refuse sleep mode (0.33 asks): it maps KV memory anew, and the TransferEngine has the old one registered."""
        return False

    def shutdown(self) -> None:
        """Stop threads and sockets."""
        if self._worker is not None:
            self._worker.close()
        if self._bootstrap is not None:
            self._bootstrap.close()
