"""The few vLLM names that this package builds on, typed, so that it type-checks where vLLM isn't installed.

At run time these are vLLM's own classes (0.32 and 0.33, `vllm/distributed/kv_transfer/kv_connector/v1/`); the type
checker sees the declarations here. Objects that vLLM hands in are described by protocols of what is read from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import Enum

    class KVConnectorRole(Enum):
        """Which of the two instances of a connector this is."""

        SCHEDULER = 0
        WORKER = 1

    class KVConnectorMetadata:
        """What the scheduler's instance sends to the workers' in every step."""

    class KVConnectorWorkerMetadata:
        """What the workers' instances send back."""

        def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
            """Merge two workers' reports."""
            raise NotImplementedError

    class KVConnectorHandshakeMetadata:
        """What one worker tells the scheduler's instance once, after start."""

    class KVConnectorTransferResults:
        """Requests whose transfers ended on a worker; failed receives are also among the finished ones."""

        def __init__(
            self, finished_sending: set[str], finished_recving: set[str], failed_recving: set[str]
        ) -> None: ...

    class KVConnectorStats:
        """Counters on their way to the front end."""

        data: dict[str, Any]

        def __init__(self, data: dict[str, Any]) -> None: ...

    class KVConnectorPromMetrics:
        """Registers metrics and records stats."""

        per_engine_labelvalues: dict[int, list[object]]

        def __init__(
            self,
            vllm_config: Any,
            metric_types: Mapping[Any, Any],
            labelnames: list[str],
            per_engine_labelvalues: dict[int, list[object]],
        ) -> None: ...

        _counter_cls: Any
        _gauge_cls: Any
        _histogram_cls: Any

    class CacheHitSource(Enum):
        """Where KV that an engine didn't compute came from."""

        P2P = "p2p"

    class KVConnectorBase:
        """vLLM's KVConnectorBase_V1."""

        def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None: ...

        def _get_connector_metadata(self) -> KVConnectorMetadata: ...

    class SupportsHMA:
        """Marks a connector that works with vLLM's hybrid KV-cache manager."""

else:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1 as KVConnectorBase,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

__all__ = [
    "CacheHitSource",
    "KVConnectorBase",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]
