"""Frames of any content: what is sealed opens unchanged, and no mutation is ever taken for a message."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_connector.errors import PeerError, Reason, WireError
from dcp_connector.handshake import decode_topology
from dcp_connector.wire import (
    Cancel,
    Channel,
    Chunk,
    Done,
    Failed,
    Grant,
    Layout,
    Message,
    Page,
    Pull,
    Release,
    Settled,
    Taken,
    Want,
)

NOW = 1_800_000_000.0
text = st.text(max_size=40)
size = st.integers(0, 2**40)
positive = st.integers(1, 2**40)
small = st.integers(1, 2**20)
layouts = st.builds(Layout, small, small, small, small, small)
pages = st.builds(Page, st.integers(0, 2**62), positive, small, positive, positive, positive, positive)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Pull,
        pull_id=text,
        transfer_id=text,
        prefill_engine=text,
        prefill_rank=size,
        decode_engine=text,
        decode_rank=size,
        budget_s=st.floats(0, 1e6),
        start=size,
        end=positive,
        digest=st.binary(max_size=32),
        layout=layouts,
        block_table=st.binary(max_size=200),
        pages=st.dictionaries(text, pages, max_size=4),
        segment=text,
        decode_stages=st.integers(1, 1024),
    ),
    st.builds(Cancel, text, text, text, size),
    st.builds(Release, text, text, size, text, text),
    st.builds(Grant, text, st.lists(st.integers(0, 2**62), max_size=64).map(tuple), positive),
    st.builds(Taken, text, size),
    st.builds(Want, text, positive),
    st.builds(Chunk, text, size),
    st.builds(Done, text, size),
    st.builds(Failed, text, st.sampled_from(Reason), st.text(max_size=200), st.floats(0, 1e6)),
    st.builds(Settled, text),
)


def channel() -> Channel:
    numbers = itertools.count()
    return Channel(b"the shared secret", lambda: NOW, lambda: next(numbers).to_bytes(16, "big"))


@given(messages)
def test_every_message_survives_the_round_trip(message: Message) -> None:
    assert channel().open(channel().seal(message)) == message


@given(messages, st.data())
def test_a_frame_with_any_byte_changed_is_refused(message: Message, data: st.DataObject) -> None:
    frame = bytearray(channel().seal(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    assert not opens(bytes(frame))


@given(messages, st.data())
def test_a_frame_that_was_cut_or_lengthened_is_refused(message: Message, data: st.DataObject) -> None:
    frame = channel().seal(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    assert not opens(frame[:cut])
    assert not opens(frame + data.draw(st.binary(min_size=1, max_size=20)))


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    assert not opens(noise)


@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode) | st.sampled_from([b"{}", b"[]", b"1", b"null"]))
def test_noise_is_no_topology(noise: bytes) -> None:
    with pytest.raises(PeerError) as error:
        decode_topology(noise)
    assert error.value.reason in (Reason.BOOTSTRAP_GARBAGE, Reason.INCOMPATIBLE)


def opens(frame: bytes) -> bool:
    try:
        channel().open(frame)
    except WireError:
        return False
    return True
