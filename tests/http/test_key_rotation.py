"""The control channel's key is replaced while transfers run, and whoever doesn't have it gets nothing."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import zmq

from dcp_connector import keys as module
from dcp_connector.errors import Reason, WireError
from dcp_connector.keys import KeyFile
from dcp_connector.wire import Channel, Settled
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import Engine, engine, wait_for
from tests.support.transfer_messages import a_cancel, a_pull, a_release

PREFILL, DECODE = Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1)
TOKENS = 70
P_TABLE, D_TABLE = [3, 9, 1, 7, 12], [5, 2, 8]
OLD, NEW = b"the old key of the channel", b"the new key of the channel"


class Clock:
    """The time of both pods, in seconds. It stands still while a transfer runs, however long that takes."""

    def __init__(self) -> None:
        self.now_s = 0.0


class Pod:
    """One pod's mount of the Secret, and the keys read from it."""

    def __init__(self, folder: Path, name: str, content: bytes, clock: Clock) -> None:
        self._path = folder / name
        self._path.write_bytes(content)
        self.keys = KeyFile(self._path, lambda: clock.now_s)

    def see(self, content: bytes) -> None:
        """The kubelet swaps the file."""
        other = self._path.with_suffix(".next")
        other.write_bytes(content)
        other.replace(self._path)


def works(p: Engine, d: Engine, transfer_id: str) -> None:
    before = d.snapshot()
    p.hold(transfer_id, TOKENS, P_TABLE)
    d.load(transfer_id, TOKENS, D_TABLE, p.origin, p.engine_id)
    assert d.received(transfer_id) == ([None, None], set()), transfer_id
    assert d.differing_bytes(before, D_TABLE, TOKENS) == [0, 0]
    assert p.sent(transfer_id) == [None]


def dropped(side: Engine) -> int:
    return sum((counters.take() or {}).get("dropped_messages", 0) for counters in side.counters)


@pytest.mark.parametrize("steps", [[NEW + b"\n" + OLD, NEW], [NEW]], ids=["both keys for a while", "at once"])
def test_transfers_run_on_while_pods_see_the_new_key_at_different_times(tmp_path: Path, steps: list[bytes]) -> None:
    clock = Clock()
    one, other = Pod(tmp_path, "prefill", OLD, clock), Pod(tmp_path, "decode", OLD, clock)
    numbers = itertools.count()
    with (
        engine("kv_producer", PREFILL, secret=one.keys) as p,
        engine("kv_consumer", DECODE, secret=other.keys) as d,
    ):

        def run_for(seconds: float) -> None:
            until_s = clock.now_s + seconds
            while clock.now_s < until_s:
                works(p, d, f"t{next(numbers)}")
                clock.now_s += 5

        for content in steps:
            one.see(content)
            run_for(100)
            other.see(content)
            run_for(module.SEALS_AFTER_S + module.OPENS_FOR_S + 100)
        assert dropped(p) == dropped(d) == 0
        assert one.keys() == other.keys() == (NEW,)


def test_a_pod_without_the_secret_is_refused_on_every_channel_of_ours() -> None:
    with (
        engine("kv_producer", PREFILL, secret=OLD) as p,
        engine("kv_consumer", DECODE, secret=OLD) as d,
        engine("kv_consumer", DECODE, secret=NEW) as stranger,
    ):
        p.hold("mine", TOKENS, P_TABLE)
        before = stranger.snapshot()
        stranger.load("mine", TOKENS, D_TABLE, p.origin, p.engine_id)
        assert stranger.received("mine") == ([Reason.BOOTSTRAP_GARBAGE] * 2, set(D_TABLE))
        # It asks prefill directly, by messages of its own making, as if it had read the topology.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            sock = context.socket(zmq.DEALER)
            sock.connect(p.workers[0].facts.control)  # type: ignore[union-attr]
            number = itertools.count()
            channel = Channel(NEW, time.time, lambda: next(number).to_bytes(16, "big"))
            fields = {"transfer_id": "mine", "prefill_engine": p.engine_id}
            pull = a_pull(segment=stranger.transports[0].segment, **fields)
            for message in (pull, a_cancel(pull), a_release("mine", stranger.engine_id)):
                sock.send(channel.seal(message))
            seen = 0

            def refused() -> bool:
                nonlocal seen
                seen += dropped(p)
                return seen == 3

            wait_for(refused, 5, "the messages were not refused")
            assert not sock.poll(100), "a message without the secret was answered"
        finally:
            context.destroy(linger=0)
        assert [(rank.memory != old).any() for rank, old in zip(stranger.ranks, before, strict=True)] == [False] * 2
        # The blocks are still held for the right one.
        d.load("mine", TOKENS, D_TABLE, p.origin, p.engine_id)
        assert d.received("mine") == ([None, None], set())
        assert p.sent("mine") == [None]


def test_a_frame_is_opened_with_any_key_in_use_and_sealed_with_the_first() -> None:
    number = itertools.count()

    def channel(*keys: bytes) -> Channel:
        return Channel(lambda: keys, lambda: 1e9, lambda: next(number).to_bytes(16, "big"))

    frame = channel(OLD, NEW).seal(Settled("pull"))
    assert channel(NEW, OLD).open(frame) == Settled("pull")
    assert channel(OLD).open(frame) == Settled("pull")
    with pytest.raises(WireError, match="don't share the same secret"):
        channel(NEW).open(frame)
