"""The metrics of `stats.METRICS` as Prometheus objects, one set per engine, without a need for vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcp_connector.stats import BUCKETS_S, METRICS, Metric, label_values, observations

#: prometheus_client's classes, or vLLM's wrappers around Ray's, which take the same arguments.
Maker = Callable[..., Any]


class Board:
    """Registers every metric with all of its label values, so that each shows 0 from the start.

    `labelnames` are the front end's own, and `per_engine_labelvalues` their values by engine index. `num_ranks` is the
    number of ranks of one engine.
    """

    def __init__(
        self,
        counter: Maker,
        gauge: Maker,
        histogram: Maker,
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
        num_ranks: int,
    ) -> None:
        self._children: dict[tuple[int, str, str | None], Any] = {}
        for metric in METRICS:
            names = [*labelnames, metric.label] if metric.label else list(labelnames)
            common = {"name": metric.name, "documentation": metric.help, "labelnames": names}
            match metric.kind:
                case "counter":
                    parent = counter(**common)
                case "gauge":
                    # With several API servers each one reads a part of the steps: the last reading counts.
                    parent = gauge(**common, multiprocess_mode="mostrecent")
                case "histogram":
                    parent = histogram(**common, buckets=list(BUCKETS_S))
            for engine_idx, values in per_engine_labelvalues.items():
                for label in label_values(metric, num_ranks) if metric.label else (None,):
                    extra = [] if label is None else [label]
                    self._children[engine_idx, metric.key, label] = parent.labels(*values, *extra)

    def observe(self, data: object, engine_idx: int = 0) -> None:
        """Add one reading. What isn't known is left out, whatever it is: an error here would end the logging loop."""
        for metric, label, number in observations(data):
            child = self._children.get((engine_idx, metric.key, label))
            if child is not None:
                _record(metric, child, number)


def _record(metric: Metric, child: Any, number: float) -> None:
    match metric.kind:
        case "counter":
            child.inc(number)
        case "gauge":
            child.set(number)
        case "histogram":
            child.observe(number)
