"""Counters: added by any thread, merged over processes, shown tolerantly."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dcp_connector.stats import METRICS, Counters, flatten, label_values, merge, observations


def test_taking_starts_over() -> None:
    counters = Counters()
    assert counters.take() is None
    counters.add("bytes_sent", 5)
    counters.add("failed", 1, "deadline")
    counters.add("failed", 2, "deadline")
    counters.set("pinned_requests", 3)
    assert counters.take() == {"bytes_sent": 5, "failed": {"deadline": 3}, "pinned_requests": 3}
    assert counters.take() is None


def test_threads_lose_nothing() -> None:
    counters = Counters()
    threads = [threading.Thread(target=lambda: [counters.add("bytes_sent") for _ in range(2000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.take() == {"bytes_sent": 16000}


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        ({}, {"bytes_sent": 1}, {"bytes_sent": 1}),
        ({"bytes_sent": 1}, {"bytes_sent": 2}, {"bytes_sent": 3}),
        ({"failed": {"a": 1}}, {"failed": {"a": 1, "b": 2}}, {"failed": {"a": 2, "b": 2}}),
        ({"pinned_requests": 5}, {"pinned_requests": 0}, {"pinned_requests": 0}),
        ({"bytes_sent": 1}, {"bytes_sent": "odd"}, {"bytes_sent": 1}),
        ({"failed": 3}, {"failed": {"a": 1}}, {"failed": 3}),
    ],
)
def test_readings_are_added_and_gauges_replaced(first: Any, second: Any, merged: Any) -> None:
    before = repr(first)
    assert merge(first, second) == merged
    assert repr(first) == before


def test_the_log_line_is_flat() -> None:
    assert flatten({"bytes_sent": 1, "failed": {"deadline": 2}, "odd": "x"}) == {"bytes_sent": 1, "failed.deadline": 2}


@pytest.mark.parametrize(
    "data",
    [None, "text", [], {}, {"unknown": 1}, {"bytes_sent": "x"}, {"bytes_sent": True}, {"bytes_sent": -1}, {"failed": 3},
     {"failed": {"no such reason": 1, 3: 4}}, {"failed": {"deadline": None}}, {"bytes_sent": {"a": 1}}],
)  # fmt: skip
def test_odd_data_is_skipped_in_silence(data: object) -> None:
    assert list(observations(data)) == []


def test_known_data_is_observed() -> None:
    data = {"bytes_sent": 1, "failed": {"deadline": 2}}
    found = [(metric.key, label, number) for metric, label, number in observations(data)]
    assert found == [("bytes_sent", None, 1), ("failed", "deadline", 2)]


def test_metric_names_are_those_that_dashboards_use() -> None:
    names = {f"{metric.name}_total" if metric.kind == "counter" else metric.name for metric in METRICS}
    assert names >= {
        "vllm:dcp_kv_bytes_sent_total",
        "vllm:dcp_kv_bytes_received_total",
        "vllm:dcp_kv_tokens_received_total",
        "vllm:dcp_kv_transfers_total",
        "vllm:dcp_kv_failed_transfers_total",
        "vllm:dcp_kv_pinned_requests",
    }
    assert all(bool(metric.label) == bool(label_values(metric)) for metric in METRICS)
