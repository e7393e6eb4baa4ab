"""A frozen peer holds a thread for as long as the TransferEngine tries: no engine gets all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from dcp_connector import lanes as module
from dcp_connector.lanes import Lanes, may_run

WAIT_S = 10.0


@dataclass(eq=False)
class Work:
    """A job that waits at a gate."""

    lane: str
    group: str
    gate: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def turn(self) -> bool:
        self.began.set()
        self.gate.wait(WAIT_S)
        self.ended.set()
        return True


def quick(lane: str, group: str) -> Work:
    work = Work(lane, group)
    work.gate.set()
    return work


@contextmanager
def running(num_threads: int) -> Iterator[Lanes]:
    lanes = Lanes(num_threads, "test")
    try:
        yield lanes
    finally:
        lanes.close()


@pytest.mark.parametrize(
    ("group", "busy", "slow", "threads", "expected"),
    [
        ("a", {}, set(), 1, True),
        ("a", {"a": 1}, set(), 1, False),
        ("a", {"a": 2}, set(), 4, True),
        ("a", {"a": 3}, set(), 4, False),
        ("b", {"a": 3}, set(), 4, True),
        ("b", {"a": 2, "b": 1}, {"a", "b"}, 4, False),
        ("c", {"a": 2, "b": 1}, {"a", "b"}, 4, True),
        ("b", {"a": 2, "b": 1}, {"a"}, 4, True),
    ],
)
def test_neither_one_engine_nor_all_slow_ones_get_all_threads(
    group: str, busy: dict[str, int], slow: set[str], threads: int, expected: bool
) -> None:
    assert may_run(group, busy, slow, threads) is expected


def test_a_frozen_engine_of_many_ranks_leaves_a_thread_to_the_others() -> None:
    frozen = [Work(f"rank {number}", "frozen") for number in range(8)]
    with running(4) as lanes:
        for work in frozen:
            lanes.add(work)
        for number in range(5):
            healthy = quick("healthy rank", "healthy")
            lanes.add(healthy)
            assert healthy.ended.wait(WAIT_S), f"job {number} of the healthy engine waits for the frozen one"
        assert sum(work.began.is_set() for work in frozen) == 3
        for work in frozen:
            work.gate.set()
        assert all(work.ended.wait(WAIT_S) for work in frozen)


def test_engines_that_were_slow_leave_a_thread_to_the_others_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    with running(3) as lanes:
        for group in ("one", "two"):
            before = quick(f"{group} before", group)
            lanes.add(before)
            assert before.ended.wait(WAIT_S)
        # The lanes note how long a turn took after it has ended.
        for lane in ("three", "four"):
            after = quick(lane, lane)
            lanes.add(after)
            assert after.ended.wait(WAIT_S)
        monkeypatch.setattr(module, "SLOW_S", 60.0)
        stuck = [Work(f"{group} {number}", group) for group in ("one", "two") for number in range(2)]
        for work in stuck:
            lanes.add(work)
        healthy = quick("healthy rank", "healthy")
        lanes.add(healthy)
        assert healthy.ended.wait(WAIT_S), "two slow engines have all threads"
        for work in stuck:
            work.gate.set()
        assert all(work.ended.wait(WAIT_S) for work in stuck)
