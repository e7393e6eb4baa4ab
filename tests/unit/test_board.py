"""The connector's metrics as they are registered and recorded. tests/contract does it with Prometheus' own classes."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_connector.board import Board
from dcp_connector.errors import Reason
from dcp_connector.stats import BUCKETS_S, METRICS, OUTCOMES

NAN = float("nan")


class Registry:
    """Stands in for prometheus_client, which the tests' environment doesn't have: remembers what is registered."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], Any] = {}
        self.registered: dict[str, dict[str, Any]] = {}

    def make(self, kind: str, **given: Any) -> Parent:
        assert given["name"] not in self.registered
        self.registered[given["name"]] = {"kind": kind, **given}
        return Parent(self, given["name"], given["labelnames"])


class Parent:
    def __init__(self, registry: Registry, name: str, labelnames: list[str]) -> None:
        self._registry, self._name, self._labelnames = registry, name, labelnames

    def labels(self, *values: object) -> Child:
        assert len(values) == len(self._labelnames)
        key = (self._name, *map(str, values[1:]))
        self._registry.values[key] = 0
        return Child(self._registry, key)


class Child:
    def __init__(self, registry: Registry, key: tuple[str, ...]) -> None:
        self._registry, self._key = registry, key

    def inc(self, number: float) -> None:
        assert number >= 0
        self._registry.values[self._key] += number

    def set(self, number: float) -> None:
        self._registry.values[self._key] = number

    def observe(self, number: float) -> None:
        self._registry.values[self._key] = [*(self._registry.values[self._key] or []), number]


class Shown:
    """A board with two engines of four ranks."""

    def __init__(self) -> None:
        self.registry = Registry()
        make = self.registry.make
        self.board = Board(
            lambda **given: make("counter", **given),
            lambda **given: make("gauge", **given),
            lambda **given: make("histogram", **given),
            ["model_name", "engine"],
            {0: ["tiny", "0"], 1: ["tiny", "1"]},
            num_ranks=4,
        )

    def labels(self, name: str, engine: str) -> set[str]:
        return {key[2] for key in self.registry.values if key[:2] == (name, engine)}

    def changed(self) -> dict[tuple[str, ...], Any]:
        return {key: value for key, value in self.registry.values.items() if value}


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_every_metric_and_label_is_there_from_the_start_at_0(shown: Shown) -> None:
    assert shown.changed() == {}
    assert {name: given["kind"] for name, given in shown.registry.registered.items()} == {
        metric.name: metric.kind for metric in METRICS
    }
    for engine in ("0", "1"):
        assert shown.labels("vllm:dcp_kv_failed_transfers", engine) == set(Reason)
        assert shown.labels("vllm:dcp_kv_tokens_recomputed", engine) == set(Reason)
        assert shown.labels("vllm:dcp_kv_transfers", engine) == set(OUTCOMES)
        assert shown.labels("vllm:dcp_kv_rank_writes", engine) >= {"direct", "pack"}
        assert shown.labels("vllm:dcp_kv_staging_bytes", engine) == {"0", "1", "2", "3"}
        assert ("vllm:dcp_kv_bytes_sent", engine) in shown.registry.values
    assert shown.registry.registered["vllm:dcp_kv_write_seconds"]["buckets"] == list(BUCKETS_S)


def test_readings_of_one_engine_are_added_and_its_gauges_replaced(shown: Shown) -> None:
    reading = {"bytes_sent": 5, "failed": {"deadline": 2}, "pinned_blocks": 7, "staging_bytes": {"1": 64, "3": 32}}
    shown.board.observe({**reading, "write_seconds": [0.2, 0.3]}, 1)
    shown.board.observe({"bytes_sent": 6, "pinned_blocks": 2, "staging_bytes": {"1": 0}, "write_seconds": [0.5]}, 1)
    assert shown.changed() == {
        ("vllm:dcp_kv_bytes_sent", "1"): 11,
        ("vllm:dcp_kv_failed_transfers", "1", "deadline"): 2,
        ("vllm:dcp_kv_pinned_blocks", "1"): 2,
        ("vllm:dcp_kv_staging_bytes", "1", "3"): 32,
        ("vllm:dcp_kv_write_seconds", "1"): [0.2, 0.3, 0.5],
    }


@pytest.mark.parametrize(
    "odd",
    [
        None,
        "text",
        {"bytes_sent": -5, "failed": {"no such reason": 1, None: 2}, "unknown": {"a": []}},
        {"staging_bytes": {"9": 5, 3: 4, "x": 1}, "pinned_blocks": NAN},
        {"write_seconds": [NAN, "x", None, -1.0], "receive_seconds": {"a": 1}},
        {"bytes_sent": 10**400, "paths": {"teleport": 1}},
    ],
    ids=["nothing", "text", "unknown labels", "odd gauges", "odd durations", "numbers without end"],
)
def test_odd_data_never_kills_the_logger(shown: Shown, odd: Any) -> None:
    """vLLM issue 43828: an error in `observe` ends the loop that logs for all engines."""
    shown.board.observe(odd)
    shown.board.observe({"bytes_sent": 1}, engine_idx=77)
    assert shown.changed() == {}
    shown.board.observe({"bytes_sent": 1})
    assert shown.changed() == {("vllm:dcp_kv_bytes_sent", "0"): 1}
