"""Waiting for a batch over TCP: asleep, for every descriptor, and no longer than a batch may take."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from dcp_connector import transfer
from dcp_connector.transfer import MooncakeTransport, TransferError


class Engine:
    """A TransferEngine whose writes end as told: each list holds what one descriptor's looks find.

    One without looks is refused: `no_batch` is what comes of submitting it.
    """

    def __init__(self, ends: list[list[int]], no_batch: int = 2**64 - 1) -> None:
        self.ends = [deque(end) for end in ends]
        self.no_batch = no_batch
        self.submitted: list[tuple[int, int, int]] = []
        self.looks = 0

    def initialize(self, *_: Any) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 12345

    def transfer_submit_write(self, _: str, src: int, dst: int, length: int) -> int:
        self.submitted.append((src, dst, length))
        number = len(self.submitted) - 1
        return number + 1 if self.ends[number] else self.no_batch

    def transfer_check_status(self, batch: int) -> int:
        self.looks += 1
        end = self.ends[batch - 1]
        return end.popleft() if len(end) > 1 else end[0]


def opened(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> MooncakeTransport:
    monkeypatch.setattr(transfer, "_load", lambda _: lambda: engine)
    monkeypatch.setattr(transfer, "runs", lambda *_: True)
    return MooncakeTransport("127.0.0.1", "tcp", "")


def test_a_batch_is_over_when_each_of_its_descriptors_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([[0, 0, 1], [1], [0, 1]])
    opened(monkeypatch, engine).write("peer:1", [10, 20, 30], [11, 21, 31], [1, 2, 3])
    assert engine.submitted == [(10, 11, 1), (20, 21, 2), (30, 31, 3)]
    assert engine.looks == 6


def test_a_failed_descriptor_fails_the_batch_once_the_others_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([[-1], [0, 0, 1]])
    with pytest.raises(TransferError, match=r"2 descriptors, 3 bytes to peer:1 failed .*code -1"):
        opened(monkeypatch, engine).write("peer:1", [0, 0], [0, 0], [1, 2])
    assert engine.looks == 4


@pytest.mark.parametrize("no_batch", [-1, 2**64 - 1, 0], ids=["minus one", "it as an unsigned number", "peer gone"])
def test_a_descriptor_that_can_not_be_submitted_fails_the_batch(monkeypatch: pytest.MonkeyPatch, no_batch: int) -> None:
    engine = Engine([[1], []], no_batch)
    with pytest.raises(TransferError, match="code -1"):
        opened(monkeypatch, engine).write("peer:1", [0, 0], [0, 0], [1, 1])
    assert engine.looks == 1


def test_a_batch_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BATCH_TIMEOUT_S", 0.01)
    with pytest.raises(TransferError, match="code -2"):
        opened(monkeypatch, Engine([[0]])).write("peer:1", [0], [0], [1])
