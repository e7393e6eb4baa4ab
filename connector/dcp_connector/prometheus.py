"""vLLM's two classes for statistics, filled with `stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_connector._vllm import KVConnectorPromMetrics, KVConnectorStats
from dcp_connector.stats import METRICS, Metric, flatten, label_values, merge, observations

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
        self._children: dict[tuple[int, str, str | None], Any] = {}
        for metric in METRICS:
            self._register(metric, labelnames)

    def observe(self, transfer_stats_data: object, engine_idx: int = 0) -> None:
        """Add one reading."""
        for metric, label, number in observations(transfer_stats_data):
            child = self._children.get((engine_idx, metric.key, label))
            if child is None:
                continue
            if metric.kind == "gauge":
                child.set(number)
            else:
                child.inc(number)

    def _register(self, metric: Metric, labelnames: list[str]) -> None:
        """Create the metric with all of its label values, so that each shows 0 from the start."""
        names = [*labelnames, metric.label] if metric.label else list(labelnames)
        if metric.kind == "gauge":
            parent = self._gauge_cls(name=metric.name, documentation=metric.help, labelnames=names)
        else:
            parent = self._counter_cls(name=metric.name, documentation=metric.help, labelnames=names)
        for engine_idx, values in self.per_engine_labelvalues.items():
            for label in label_values(metric) if metric.label else (None,):
                extra = [label] if label is not None else []
                self._children[engine_idx, metric.key, label] = parent.labels(*values, *extra)
