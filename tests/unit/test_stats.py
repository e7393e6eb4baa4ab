"""Counters: added by any thread, merged over processes, shown tolerantly."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dcp_connector.stats import MAX_SAMPLES, METRICS, Counters, flatten, label_values, merge, observations


def test_taking_starts_over() -> None:
    counters = Counters()
    assert counters.take() is None
    counters.add("bytes_sent", 5)
    counters.add("failed", 1, "deadline")
    counters.add("failed", 2, "deadline")
    counters.set("pinned_requests", 3)
    assert counters.take() == {"bytes_sent": 5, "failed": {"deadline": 3}, "pinned_requests": 3}
    assert counters.take() is None


def test_durations_are_kept_one_by_one_up_to_a_bound() -> None:
    counters = Counters()
    for number in range(MAX_SAMPLES + 10):
        counters.sample("write_seconds", float(number))
    assert counters.take() == {"write_seconds": [float(number) for number in range(MAX_SAMPLES)]}
    assert counters.take() is None


def test_a_gauge_by_rank_remembers_its_level_over_readings() -> None:
    counters = Counters()
    counters.rank = 3
    counters.change("staging_bytes", 100)
    counters.change("staging_bytes", 50)
    assert counters.take() == {"staging_bytes": {"3": 150}}
    assert counters.take() is None
    counters.change("staging_bytes", -150)
    assert counters.take() == {"staging_bytes": {"3": 0}}


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
        ({"write_seconds": [1.0]}, {"write_seconds": [2.0, 3.0]}, {"write_seconds": [1.0, 2.0, 3.0]}),
        ({"write_seconds": [1.0]}, {"write_seconds": 5}, {"write_seconds": [1.0]}),
        (
            {"staging_bytes": {"0": 5, "1": 7}},
            {"staging_bytes": {"1": 0, "2": 3}},
            {"staging_bytes": {"0": 5, "1": 0, "2": 3}},
        ),
    ],
)
def test_readings_are_added_and_gauges_replaced(first: Any, second: Any, merged: Any) -> None:
    before = repr(first)
    assert merge(first, second) == merged
    assert repr(first) == before


def test_the_log_line_is_flat() -> None:
    data = {"bytes_sent": 1, "failed": {"deadline": 2}, "write_seconds": [0.25, 0.75, "x"], "odd": "x", "none": []}
    assert flatten(data) == {
        "bytes_sent": 1,
        "failed.deadline": 2,
        "write_seconds.mean": 0.5,
        "write_seconds.max": 0.75,
    }


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "data",
    [None, "text", [], {}, {"unknown": 1}, {"bytes_sent": "x"}, {"bytes_sent": True}, {"bytes_sent": -1}, {"failed": 3},
     {"failed": {"no such reason": 1, 3: 4}}, {"failed": {"deadline": None}}, {"bytes_sent": {"a": 1}},
     {"bytes_sent": NAN}, {"bytes_sent": INFINITY}, {"bytes_sent": 10**400}, {"bytes_sent": [1]}, {"write_seconds": 1},
     {"write_seconds": [NAN, None, "x", -1.0, [1.0], True]}, {"pinned_blocks": None}, {"staging_bytes": 7}],
)  # fmt: skip
def test_odd_data_is_skipped_in_silence(data: object) -> None:
    assert list(observations(data)) == []


def test_known_data_is_observed() -> None:
    data = {"bytes_sent": 1, "failed": {"deadline": 2}, "staging_bytes": {"1": 5}, "write_seconds": [0.1, 0.2]}
    found = [(metric.key, label, number) for metric, label, number in observations(data)]
    assert found == [
        ("bytes_sent", None, 1),
        ("failed", "deadline", 2),
        ("staging_bytes", "1", 5),
        ("write_seconds", None, 0.1),
        ("write_seconds", None, 0.2),
    ]


def test_metric_names_are_those_that_dashboards_use() -> None:
    names = {f"{metric.name}_total" if metric.kind == "counter" else metric.name for metric in METRICS}
    assert names >= {
        "vllm:dcp_kv_bytes_sent_total",
        "vllm:dcp_kv_bytes_received_total",
        "vllm:dcp_kv_tokens_received_total",
        "vllm:dcp_kv_transfers_total",
        "vllm:dcp_kv_failed_transfers_total",
        "vllm:dcp_kv_pinned_requests",
        "vllm:dcp_kv_pinned_blocks",
        "vllm:dcp_kv_staging_bytes",
        "vllm:dcp_kv_receive_seconds",
        "vllm:dcp_kv_write_seconds",
        "vllm:dcp_kv_tokens_recomputed_total",
        "vllm:dcp_kv_refused_peers_total",
        "vllm:dcp_kv_descriptors_total",
        "vllm:dcp_kv_rank_writes_total",
        "vllm:dcp_kv_dropped_messages_total",
    }
    assert len(names) == len({metric.key for metric in METRICS}) == len(METRICS)
    assert all(bool(metric.label) == bool(label_values(metric)) for metric in METRICS)
