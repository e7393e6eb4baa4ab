"""Counters of one process between two readings, and the names under which Prometheus shows them.

The data travels from workers through the scheduler to the front end as a plain dictionary, so every reader has to
tolerate keys that are missing or that a later version adds: an error here would end vLLM's logging loop.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast

from dcp_connector.errors import Reason

#: A flat dictionary of numbers; one level of nesting for labelled counters: {"failed": {"deadline": 2}}.
Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: the key in the data, its name without `_total`, and the label of nested counters."""

    key: str
    name: str
    kind: Literal["counter", "gauge"]
    label: str | None
    help: str


METRICS = (
    Metric("bytes_sent", "vllm:dcp_kv_bytes_sent", "counter", None, "Bytes of KV written to decode engines."),
    Metric("bytes_received", "vllm:dcp_kv_bytes_received", "counter", None, "Bytes of KV received from prefill."),
    Metric(
        "tokens_received",
        "vllm:dcp_kv_tokens_received",
        "counter",
        None,
        "Prompt tokens whose KV came from prefill, counted once per request.",
    ),
    Metric(
        "transfers",
        "vllm:dcp_kv_transfers",
        "counter",
        "outcome",
        "Transfers that ended, counted once per request: sent, received, failed, aborted, released, skipped.",
    ),
    Metric(
        "failed",
        "vllm:dcp_kv_failed_transfers",
        "counter",
        "reason",
        "Transfers that ended without their KV arriving, counted once per request and side, by reason.",
    ),
    Metric(
        "pinned_requests",
        "vllm:dcp_kv_pinned_requests",
        "gauge",
        None,
        "Finished prefill requests whose blocks are held for a decode engine.",
    ),
    Metric("descriptors", "vllm:dcp_kv_descriptors", "counter", None, "TransferEngine descriptors written."),
    Metric("paths", "vllm:dcp_kv_rank_writes", "counter", "path", "Pulls of a decode rank served, by transfer path."),
    Metric("dropped_messages", "vllm:dcp_kv_dropped_messages", "counter", None, "Control messages refused here."),
)

OUTCOMES = ("sent", "received", "failed", "aborted", "released", "skipped")
_LABELS: Mapping[str, tuple[str, ...]] = {
    "transfers": OUTCOMES,
    "failed": tuple(Reason),
    "paths": ("direct", "pack"),
}
_GAUGES = frozenset(metric.key for metric in METRICS if metric.kind == "gauge")


def label_values(metric: Metric) -> tuple[str, ...]:
    """Return the closed list of a labelled metric's values, so that each starts at 0 instead of appearing late."""
    return _LABELS.get(metric.key, ())


class Counters:
    """Thread-safe counters. Any thread adds, the engine's main thread takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: Data = {}

    def add(self, key: str, amount: int = 1, label: str | None = None) -> None:
        """Add to a counter, or to one label of it."""
        with self._lock:
            if label is None:
                self._data[key] = self._data.get(key, 0) + amount
            else:
                nested = self._data.setdefault(key, {})
                nested[label] = nested.get(label, 0) + amount

    def set(self, key: str, value: int) -> None:
        """Set a gauge."""
        with self._lock:
            self._data[key] = value

    def take(self) -> Data | None:
        """Return what was counted since the last call, or None when nothing was. Never waits for long."""
        with self._lock:
            if not self._data:
                return None
            data, self._data = self._data, {}
            return data


def merge(first: Data, second: Data) -> Data:
    """Return the sum of two readings; the later value of a gauge."""
    merged: Data = dict(first)
    for key, value in second.items():
        before = merged.get(key)
        if key in _GAUGES or before is None:
            merged[key] = value
        elif (first_nested := _as_mapping(before)) is not None and (nested := _as_mapping(value)) is not None:
            merged[key] = merge(first_nested, nested)
        elif _is_number(before) and _is_number(value):
            merged[key] = before + value
    return merged


def flatten(data: Data) -> dict[str, int | float]:
    """Return one level of numbers, for vLLM's log line: {"failed.deadline": 2}."""
    flat: dict[str, int | float] = {}
    for key, value in data.items():
        nested = _as_mapping(value)
        if nested is not None:
            flat.update({f"{key}.{label}": number for label, number in nested.items() if _is_number(number)})
        elif _is_number(value):
            flat[key] = value
    return flat


def observations(data: object) -> Iterator[tuple[Metric, str | None, int | float]]:
    """Yield (metric, label value, number) for everything in `data` that is a known metric; skip the rest silently."""
    known = _as_mapping(data) or {}
    for metric in METRICS:
        value = known.get(metric.key)
        if metric.label is None:
            if _is_number(value) and value >= 0:
                yield metric, None, value
        else:
            for label, number in (_as_mapping(value) or {}).items():
                if label in label_values(metric) and _is_number(number) and number >= 0:
                    yield metric, label, number


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_mapping(value: object) -> Data | None:
    return cast("Data", value) if isinstance(value, dict) else None
