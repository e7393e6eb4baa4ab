"""Frames: what is sealed opens unchanged, and everything else is refused in words."""

from __future__ import annotations

import struct

import msgspec
import pytest

from dcp_connector import wire
from dcp_connector.errors import Reason, WireError
from dcp_connector.wire import Channel, Done, Failed, Layout, Settled, token_digest
from tests.support.transfer_messages import a_cancel, a_pull, a_release

NOW = 1_800_000_000.0


def channel(secret: bytes = b"the shared secret", now: float = NOW) -> Channel:
    numbers = iter(range(10**9))
    return Channel(secret, lambda: now, lambda: next(numbers).to_bytes(16, "big"))


@pytest.mark.parametrize(
    "message",
    [
        a_pull(),
        a_cancel(a_pull()),
        a_release(),
        Done("pull", 5),
        Failed("pull", Reason.TRANSFER_ERROR, "words"),
        Settled("pull"),
        wire.Want("pull", 8 << 20),
        wire.Grant("pull", (4096, 8192), 4096),
        wire.Chunk("pull", 3),
        wire.Taken("pull", 3),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_sealed_message_opens_unchanged(message: wire.Message) -> None:
    assert channel().open(channel().seal(message)) == message


def test_the_frame_is_laid_out_as_documented() -> None:
    frame = channel().seal(Settled("p"))
    assert frame[:3] == b"DKV"
    assert frame[3] == wire.PROTOCOL_VERSION
    assert struct.unpack(">Q", frame[4:12])[0] == int(NOW * 1000)
    assert frame[12:28] == (0).to_bytes(16, "big")
    assert msgspec.msgpack.decode(frame[60:]) == {"k": "settled", "pull_id": "p"}


def altered(position: int, value: int = 0xFF) -> bytes:
    frame = bytearray(channel().seal(Settled("p")))
    frame[position] ^= value
    return bytes(frame)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "frame of 0 bytes, expected at least 60"),
        (b"GET / HTTP/1.1\r\n" * 5, "frame begins with b'GET', expected b'DKV'"),
        (bytes(wire.MAX_FRAME_BYTES + 1), "expected at most"),
        (altered(3, 0x80), f"frame has protocol version {128 + wire.PROTOCOL_VERSION}, this connector speaks"),
        (altered(4), "wrong authentication code"),
        (altered(12), "wrong authentication code"),
        (altered(28), "wrong authentication code"),
        (altered(-1), "wrong authentication code"),
        (channel(b"another secret").seal(Settled("p")), "the two sides don't share the same secret"),
        (channel(now=NOW - 121).seal(Settled("p")), "frame was sent 121 s ago, accepted are 120 s"),
        (channel(now=NOW + 121).seal(Settled("p")), "frame was sent -121 s ago"),
    ],
)
def test_a_frame_that_is_not_fresh_and_authentic_is_refused_in_words(frame: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words.replace("'", ".")):
        channel().open(frame)


def test_the_version_is_compared_before_the_authentication_code() -> None:
    frame = bytearray(channel(b"another secret").seal(Settled("p")))
    frame[3] = 77
    with pytest.raises(WireError, match="protocol version 77"):
        channel().open(bytes(frame))


def test_a_frame_that_was_received_before_is_refused() -> None:
    receiver = channel()
    frame = channel().seal(Settled("p"))
    receiver.open(frame)
    with pytest.raises(WireError, match="received before"):
        receiver.open(frame)


def test_remembered_nonces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_NONCES", 10)
    sender, receiver = channel(), channel()
    for _ in range(50):
        receiver.open(sender.seal(Settled("p")))
    assert len(receiver._seen) == 10


@pytest.mark.parametrize(
    "payload",
    [
        {"k": "nonsense"},
        {"pull_id": "p"},
        {"k": "settled", "pull_id": 3},
        {"k": "done", "pull_id": "p", "num_bytes": -1},
        {"k": "settled", "pull_id": "x" * 513},
        {"k": "failed", "pull_id": "p", "reason": "not a reason", "detail": ""},
        [1, 2, 3],
        None,
    ],
)
def test_an_authentic_frame_with_a_payload_that_is_no_message_is_refused(
    payload: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = channel()
    monkeypatch.setattr(sender, "_encoder", _Fixed(payload))
    with pytest.raises(WireError, match="payload is not a message"):
        channel().open(sender.seal(Settled("p")))


class _Fixed:
    def __init__(self, payload: object) -> None:
        self._payload = payload

    def encode(self, message: object) -> bytes:
        return msgspec.msgpack.encode(self._payload)


def test_fields_of_a_later_version_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = channel()
    monkeypatch.setattr(sender, "_encoder", _Fixed({"k": "settled", "pull_id": "p", "new": 1}))
    assert channel().open(sender.seal(Settled("p"))) == Settled("p")


def test_a_message_that_no_peer_would_take_is_not_sent() -> None:
    with pytest.raises(WireError, match="longer than"):
        channel().seal(a_pull(block_table=bytes(wire.MAX_FRAME_BYTES)))


@pytest.mark.parametrize("sizes", [(0, 1, 1, 16, 1), (2**21, 1, 1, 16, 1)])
def test_sizes_that_are_absurd_are_refused_while_decoding(sizes: tuple[int, ...]) -> None:
    frame = channel().seal(a_pull(layout=Layout(*sizes)))
    with pytest.raises(WireError, match=r"\$\.layout"):
        channel().open(frame)


def test_digests_differ_by_token_by_length_and_by_adapter() -> None:
    tokens = bytes(range(8))
    digests = {
        token_digest(tokens, ""),
        token_digest(tokens[:4], ""),
        token_digest(tokens, "lora"),
        token_digest(b"", ""),
    }
    assert len(digests) == 4
