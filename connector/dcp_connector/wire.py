"""The control channel's messages, byte by byte.

Version history
---------------
1   first version (0.1.0)
2   the scatter path: Want, Grant, Chunk, Taken; `decode_stages` in a Pull, whose ranks count over pipeline stages

A frame (one ZeroMQ message part)
---------------------------------
    offset  size  content
    0       3     b"DKV"
    3       1     protocol version, unsigned
    4       8     time of sending, milliseconds since 1970, unsigned, big endian
    12      16    nonce, random
    28      32    HMAC-SHA256 of bytes 0..27 followed by the payload, key = the newest that both sides share (`keys`)
    60      n     payload: msgpack of one message below, a map with its kind under "k"

The version is compared before anything else is looked at, the code before the payload is decoded. A frame that is too
long, too old, too far in the future, or whose nonce was seen already is refused. Decoding is strict: unknown kinds and
wrong types are refused, unknown fields are ignored so that a later version may add some.

Conversation
------------
Decode asks, prefill answers. All answers name the `pull_id` that they settle.

    decode -> prefill   Pull      write tokens [start, end) of a transfer into my pages
    decode -> prefill   Cancel    I give this pull up; tell me when nothing of it is in flight any more
    decode -> prefill   Release   this rank's blocks are not needed for the transfer
    prefill -> decode   Want      I would write this pull by the scatter path; where may I put the chunks?
    decode -> prefill   Grant     chunk k goes into slot k % n of these n slots; none: take another path
    prefill -> decode   Chunk     a chunk lies in its slot
    decode -> prefill   Taken     the chunk was read and its slot is free
    prefill -> decode   Done      everything of the pull has been written
    prefill -> decode   Failed    the pull ends without all of it written; it says when nothing is in flight any more
    prefill -> decode   Settled   the cancelled pull has nothing in flight any more
"""

import hashlib
import hmac
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated

import msgspec

from dcp_connector.errors import Reason, WireError

PROTOCOL_VERSION = 2
#: Longest frame. A block table of 250,000 blocks and 200 layers' pages stays far below it.
MAX_FRAME_BYTES = 4 * 1024 * 1024
#: How far the two hosts' clocks may differ, and how long a frame may be under way.
MAX_AGE_S = 120.0
#: Nonces remembered at most; the oldest go first.
MAX_NONCES = 65536

_MAGIC = b"DKV"
_HEADER = struct.Struct(">3sBQ16s")
_MAC_BYTES = 32
_OVERHEAD = _HEADER.size + _MAC_BYTES
_MAX_SIGNATURES = 16

_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_Small = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """One side's T, W, I, B, H of kv-mapping."""

    tensor_parallel_size: _Small
    dcp_size: _Small
    interleave: _Small
    block_size: _Small
    num_kv_heads: _Small


class Page(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank keeps (kernel block, head, row) of one layer; bytes, strides as of the registered tensor."""

    base: _Address
    num_blocks: _Positive
    kernel_block_size: _Small
    block_stride: _Positive
    head_stride: _Positive
    row_stride: _Positive
    entry_bytes: _Positive


class Pull(msgspec.Struct, frozen=True, tag_field="k", tag="pull"):
    """Decode rank asks a prefill rank to write tokens [start, end) of a transfer into its pages."""

    pull_id: _Text
    transfer_id: _Text
    prefill_engine: _Text
    prefill_rank: _Size
    decode_engine: _Text
    #: counted like `prefill_rank` over pipeline stages and tensor ranks: stage * T + tensor rank
    decode_rank: _Size
    #: seconds until the asking side gives up, counted from sending
    budget_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    start: _Size
    end: _Positive
    #: digest of the first `end` prompt tokens, see `token_digest`
    digest: Annotated[bytes, msgspec.Meta(max_length=32)]
    layout: Layout
    #: the request's block table, little-endian int64
    block_table: bytes
    pages: dict[_Text, Page]
    #: TransferEngine segment of the asking rank, "host:port"
    segment: _Text
    #: pipeline stages of the decode engine; each of them asks, so that prefill knows when all have what they need
    decode_stages: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1


class Cancel(msgspec.Struct, frozen=True, tag_field="k", tag="cancel"):
    """Decode gives a pull up and waits for Settled (or Done, or Failed)."""

    pull_id: _Text
    transfer_id: _Text
    prefill_engine: _Text
    prefill_rank: _Size


class Release(msgspec.Struct, frozen=True, tag_field="k", tag="release"):
    """Decode needs nothing (more) from this prefill rank for the transfer. Other ranks ignore it."""

    transfer_id: _Text
    prefill_engine: _Text
    prefill_rank: _Size
    decode_engine: _Text
    #: why, for the log
    why: _Text


class Want(msgspec.Struct, frozen=True, tag_field="k", tag="want"):
    """Prefill would write this pull in chunks of at most `chunk_bytes` into staging memory of decode."""

    pull_id: _Text
    chunk_bytes: _Positive


class Grant(msgspec.Struct, frozen=True, tag_field="k", tag="grant"):
    """Staging memory of decode that is this pull's until it is settled: addresses of slots, and the bytes of a chunk.

    Without slots decode has no staging memory for this pull. `chunk_bytes` is at most what was wanted.
    """

    pull_id: _Text
    slots: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=64)]
    chunk_bytes: _Positive


class Chunk(msgspec.Struct, frozen=True, tag_field="k", tag="chunk"):
    """This chunk of the pull lies in slot `number` % number of slots; `chunks` says what it holds."""

    pull_id: _Text
    number: _Size


class Taken(msgspec.Struct, frozen=True, tag_field="k", tag="taken"):
    """This chunk was read; its slot may be written again."""

    pull_id: _Text
    number: _Size


class Done(msgspec.Struct, frozen=True, tag_field="k", tag="done"):
    """Every byte of the pull has been written and acknowledged by the TransferEngine."""

    pull_id: _Text
    num_bytes: _Size


class Failed(msgspec.Struct, frozen=True, tag_field="k", tag="failed"):
    """The pull ended without all of it written. No part of it arrives later than `quiet_s` after this message."""

    pull_id: _Text
    reason: Reason
    detail: Annotated[str, msgspec.Meta(max_length=2048)]
    #: 0: nothing is in flight. Else the TransferEngine failed a batch, of which some may still be under way
    quiet_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0


class Settled(msgspec.Struct, frozen=True, tag_field="k", tag="settled"):
    """A cancelled pull has nothing in flight any more."""

    pull_id: _Text


ToPrefill = Pull | Cancel | Release | Grant | Taken
ToDecode = Done | Failed | Settled | Want | Chunk
Message = ToPrefill | ToDecode


def token_digest(tokens: bytes, adapter: str) -> bytes:
    """Return 16 bytes that differ between prompts: `tokens` are little-endian int32 ids, `adapter` the LoRA name or "".

    Prefill compares it with its own, so that a transfer id used for two prompts can never yield the other one's KV.
    """
    return hashlib.blake2b(tokens, digest_size=16, key=hashlib.blake2b(adapter.encode()).digest()).digest()


#: The shared secret: one key, or what returns the keys in use now, of which the first seals and all open.
Secret = bytes | Callable[[], tuple[bytes, ...]]


def keys_of(secret: Secret) -> tuple[bytes, ...]:
    """Return the keys in use now, the one that seals first."""
    return (secret,) if isinstance(secret, bytes) else secret()


def sign(secret: Secret, body: bytes) -> str:
    """Return the hex HMAC-SHA256 of a handshake served over HTTP; one for each key, separated by commas."""
    return ",".join(_signature(key, body).decode() for key in keys_of(secret))


def is_signed(secret: Secret, body: bytes, signatures: str) -> bool:
    """Tell whether one of our keys signed `body`, in a time that doesn't depend on where signatures differ."""
    given = signatures.encode("utf-8", "replace").split(b",")[:_MAX_SIGNATURES]
    return any(hmac.compare_digest(_signature(key, body), one) for key in keys_of(secret) for one in given)


def _signature(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, b"topology\n" + body, hashlib.sha256).hexdigest().encode()


class Channel:
    """Seals and opens frames with a shared secret. Not thread-safe: one per thread that owns a socket.

    `clock` returns seconds since 1970, `nonce` 16 random bytes.
    """

    def __init__(self, secret: Secret, clock: Callable[[], float], nonce: Callable[[], bytes]) -> None:
        self._secret = secret
        self._clock = clock
        self._nonce = nonce
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

    def seal(self, message: Message) -> bytes:
        """Return the frame for `message`. Raises WireError if it would be longer than a peer accepts."""
        payload = self._encoder.encode(message)
        if len(payload) + _OVERHEAD > MAX_FRAME_BYTES:
            raise WireError(
                f"a message of {len(payload)} bytes is longer than the {MAX_FRAME_BYTES} that a peer accepts"
            )
        header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, int(self._clock() * 1000), self._nonce())
        return header + _mac(keys_of(self._secret)[0], header, payload) + payload

    def open(self, frame: bytes) -> Message:
        """Return the message in `frame`. Raises WireError in words for everything that isn't fresh and authentic."""
        if len(frame) < _OVERHEAD:
            raise WireError(f"frame of {len(frame)} bytes, expected at least {_OVERHEAD}")
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"frame of {len(frame)} bytes, expected at most {MAX_FRAME_BYTES}")
        header = frame[: _HEADER.size]
        magic, version, sent_ms, nonce = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise WireError(f"frame begins with {magic!r}, expected {_MAGIC!r}")
        if version != PROTOCOL_VERSION:
            raise WireError(f"frame has protocol version {version}, this connector speaks {PROTOCOL_VERSION}")
        payload = frame[_OVERHEAD:]
        code = frame[_HEADER.size : _OVERHEAD]
        if not any(hmac.compare_digest(code, _mac(key, header, payload)) for key in keys_of(self._secret)):
            raise WireError("frame has a wrong authentication code: the two sides don't share the same secret")
        self._check_fresh(nonce, sent_ms / 1000)
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WireError(f"payload is not a message: {error}") from error

    def _check_fresh(self, nonce: bytes, sent: float) -> None:
        now = self._clock()
        if abs(now - sent) > MAX_AGE_S:
            raise WireError(
                f"frame was sent {now - sent:.0f} s ago, accepted are {MAX_AGE_S:.0f} s: check both hosts' clocks"
            )
        if nonce in self._seen:
            raise WireError("frame was received before")
        self._seen[nonce] = now
        while self._seen and (len(self._seen) > MAX_NONCES or next(iter(self._seen.values())) < now - 2 * MAX_AGE_S):
            self._seen.popitem(last=False)


def _mac(key: bytes, header: bytes, payload: bytes) -> bytes:
    return hmac.new(key, header + payload, hashlib.sha256).digest()
