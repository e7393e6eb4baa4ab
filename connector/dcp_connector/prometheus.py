"""vLLM's two classes for statistics, filled with `stats` and `board`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_connector._vllm import KVConnectorPromMetrics, KVConnectorStats
from dcp_connector.board import Board
from dcp_connector.stats import flatten, merge

if TYPE_CHECKING:
    from collections.abc import Mapping


class DCPStats(KVConnectorStats):
    """Counters between two readings, on their way from a worker to the front end."""

    def reset(self) -> None:
        """Start over."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another process's counters."""
        self.data = merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line."""
        return flatten(self.data)

    def is_empty(self) -> bool:
        """Tell whether nothing was counted."""
        return not self.data


class DCPPromMetrics(KVConnectorPromMetrics):
    """The metrics of `stats.METRICS`, one set per engine. `observe` ignores what it doesn't know."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        parallel = vllm_config.parallel_config
        self._board = Board(
            self._counter_cls,
            self._gauge_cls,
            self._histogram_cls,
            labelnames,
            per_engine_labelvalues,
            int(parallel.pipeline_parallel_size) * int(parallel.tensor_parallel_size),
        )

    def observe(self, transfer_stats_data: object, engine_idx: int = 0) -> None:
        """Add one reading."""
        self._board.observe(transfer_stats_data, engine_idx)
