"""Counters of one process between two readings, and the names under which Prometheus shows them.

The data travels from workers through the scheduler to the front end as a plain dictionary, so every reader has to
tolerate keys that are missing or that a later version adds: an error here would end vLLM's logging loop (its issue
43828). Per kind of metric the dictionary holds

    counter     {"bytes_sent": 5}                   what was added since the last reading
                {"failed": {"deadline": 2}}         the same by label
    gauge       {"pinned_requests": 3}              the present value; the last one counts
                {"staging_bytes": {"1": 4096}}      the same by rank, because every rank has its own
    histogram   {"receive_seconds": [0.02, 0.5]}    each duration since the last reading
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast, get_args

from dcp_connector.errors import Reason
from dcp_connector.paths import Path

#: A dictionary as above: numbers, numbers by label, lists of seconds.
Data = dict[str, Any]

#: Durations kept between two readings; beyond it they are left out of the histogram. An engine reads once per step.
MAX_SAMPLES = 4096
#: Upper edges of the histograms' buckets, in seconds.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: the key in the data, its name (a counter's without `_total`), and the label of nested numbers."""

    key: str
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    label: Literal["outcome", "reason", "path", "rank"] | None
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
        "tokens_recomputed",
        "vllm:dcp_kv_tokens_recomputed",
        "counter",
        "reason",
        "Prompt tokens that a decode engine computed itself although prefill should have supplied them, by reason.",
    ),
    Metric(
        "transfers",
        "vllm:dcp_kv_transfers",
        "counter",
        "outcome",
        "Transfers that ended, counted once per request and side: sent, received, failed, expired (lease or deadline), "
        "aborted, released, skipped.",
    ),
    Metric(
        "failed",
        "vllm:dcp_kv_failed_transfers",
        "counter",
        "reason",
        "Transfers that ended without their KV arriving, counted once per request and side, by reason.",
    ),
    Metric(
        "refused_peers",
        "vllm:dcp_kv_refused_peers",
        "counter",
        None,
        "Prefill engines that a decode rank refused at the handshake because they don't fit, counted once per rank and "
        "start of the peer; the log says why.",
    ),
    Metric(
        "pinned_requests",
        "vllm:dcp_kv_pinned_requests",
        "gauge",
        None,
        "Finished prefill requests whose blocks are held for a decode engine.",
    ),
    Metric(
        "pinned_blocks",
        "vllm:dcp_kv_pinned_blocks",
        "gauge",
        None,
        "Blocks of finished prefill requests that are held for a decode engine.",
    ),
    Metric(
        "quarantined_blocks",
        "vllm:dcp_kv_quarantined_blocks",
        "gauge",
        None,
        "Blocks that a decode engine keeps out of use although their request ended, because a prefill rank has not "
        "confirmed that it stopped writing into them.",
    ),
    Metric(
        "staging_bytes",
        "vllm:dcp_kv_staging_bytes",
        "gauge",
        "rank",
        "Staging memory in use, by rank; see staging_bytes of the connector's options for how much there is.",
    ),
    Metric(
        "receive_seconds",
        "vllm:dcp_kv_receive_seconds",
        "histogram",
        None,
        "From a request's blocks on decode to the KV of all ranks in them, once per request that received its KV.",
    ),
    Metric(
        "write_seconds",
        "vllm:dcp_kv_write_seconds",
        "histogram",
        None,
        "Writing what one decode rank asked one prefill rank for, gathering included, once per pull that succeeded.",
    ),
    Metric("descriptors", "vllm:dcp_kv_descriptors", "counter", None, "TransferEngine descriptors written."),
    Metric("paths", "vllm:dcp_kv_rank_writes", "counter", "path", "Pulls of a decode rank served, by transfer path."),
    Metric(
        "failed_pulls",
        "vllm:dcp_kv_failed_pulls",
        "counter",
        "reason",
        "Answers of a prefill rank that refuse a decode rank's pull or say that it failed, repeated ones included.",
    ),
    Metric("dropped_messages", "vllm:dcp_kv_dropped_messages", "counter", None, "Control messages refused here."),
)

OUTCOMES = ("sent", "received", "failed", "expired", "aborted", "released", "skipped")
_LABELS: Mapping[str, tuple[str, ...]] = {
    "outcome": OUTCOMES,
    "reason": tuple(Reason),
    "path": get_args(Path),
}
#: No honest number is as large.
_LIMIT = 2**63
_GAUGES = frozenset(metric.key for metric in METRICS if metric.kind == "gauge")


def label_values(metric: Metric, num_ranks: int = 1) -> tuple[str, ...]:
    """Return the closed list of a labelled metric's values, so that each starts at 0 instead of appearing late."""
    if metric.label == "rank":
        return tuple(str(rank) for rank in range(num_ranks))
    return _LABELS[metric.label] if metric.label else ()


class Counters:
    """Thread-safe counters. Any thread adds, the engine's main thread takes.

    `rank` is the label of this process's gauges by rank, counted over pipeline and tensor ranks (pp * T + tp).
    """

    def __init__(self) -> None:
        self.rank = 0
        self._lock = threading.Lock()
        self._data: Data = {}
        self._levels: dict[str, int] = {}

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

    def change(self, key: str, by: int) -> None:
        """Raise or lower a gauge by rank; it starts at 0."""
        with self._lock:
            level = self._levels[key] = self._levels.get(key, 0) + by
            self._data[key] = {str(self.rank): level}

    def sample(self, key: str, seconds: float) -> None:
        """Record one duration in a histogram."""
        with self._lock:
            samples = self._data.setdefault(key, [])
            if len(samples) < MAX_SAMPLES:
                samples.append(seconds)

    def take(self) -> Data | None:
        """Return what was counted since the last call, or None when nothing was. Never waits for long."""
        with self._lock:
            if not self._data:
                return None
            data, self._data = self._data, {}
            return data


def merge(first: Data, second: Data) -> Data:
    """Return the sum of two readings: counters added, durations together, the later value of a gauge (of each rank)."""
    merged: Data = dict(first)
    for key, value in second.items():
        before = merged.get(key)
        nested, nested_before = _as_mapping(value), _as_mapping(before)
        if before is None:
            merged[key] = value
        elif key in _GAUGES:
            merged[key] = {**nested_before, **nested} if nested_before is not None and nested is not None else value
        elif nested_before is not None and nested is not None:
            merged[key] = merge(nested_before, nested)
        elif (samples_before := _as_list(before)) is not None and (samples := _as_list(value)) is not None:
            merged[key] = (samples_before + samples)[:MAX_SAMPLES]
        elif _is_number(before) and _is_number(value):
            merged[key] = before + value
    return merged


def flatten(data: Data) -> dict[str, int | float]:
    """Return one level of numbers, for vLLM's log line: {"failed.deadline": 2, "receive_seconds.mean": 0.2}."""
    flat: dict[str, int | float] = {}
    for key, value in data.items():
        nested, samples = _as_mapping(value), _as_list(value)
        if nested is not None:
            flat.update({f"{key}.{label}": number for label, number in nested.items() if _is_number(number)})
        elif samples is not None:
            seconds = [number for number in samples if _is_count(number)]
            if seconds:
                flat[f"{key}.mean"] = round(sum(seconds) / len(seconds), 4)
                flat[f"{key}.max"] = round(max(seconds), 4)
        elif _is_number(value):
            flat[key] = value
    return flat


def observations(data: object) -> Iterator[tuple[Metric, str | None, int | float]]:
    """Yield (metric, label value, number) for everything in `data` that is a known metric; skip the rest silently.

    Every duration of a histogram is yielded by itself. Labels of closed lists are checked, ranks are not.
    """
    known = _as_mapping(data) or {}
    for metric in METRICS:
        value = known.get(metric.key)
        if metric.label is not None:
            for label, number in (_as_mapping(value) or {}).items():
                if (metric.label == "rank" or label in label_values(metric)) and _is_count(number):
                    yield metric, label, number
        else:
            numbers = (_as_list(value) or []) if metric.kind == "histogram" else [value]
            for number in numbers:
                if _is_count(number):
                    yield metric, None, number


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> TypeGuard[int | float]:
    """Tell a number that a metric can take; Prometheus' own classes raise for others, or for integers without end."""
    return _is_number(value) and 0 <= value < _LIMIT


def _as_mapping(value: object) -> Data | None:
    return cast("Data", value) if isinstance(value, dict) else None


def _as_list(value: object) -> list[Any] | None:
    return cast("list[Any]", value) if isinstance(value, list) else None
