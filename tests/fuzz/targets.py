"""What is fuzzed: each target makes inputs that are nearly right, and feeds them to the product.

A target may raise only what its docstring in the product promises; `Target.feed` lets everything else through, and that
ends the run. `Target.sizes` names everything that could grow with what peers send, and its bound.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec

from dcp_connector import httpd, requests_prefill, wire
from dcp_connector.admit import admit
from dcp_connector.bind import BindError, bind_layers
from dcp_connector.bootstrap import BootstrapServer
from dcp_connector.errors import ParamsError, PeerError, Reason, WireError
from dcp_connector.failures import FailureLog
from dcp_connector.geometry import SideLayout
from dcp_connector.handshake import (
    RankFacts,
    SideFacts,
    Topology,
    assemble,
    decode_topology,
    encode_topology,
    find_mismatches,
    page_layout,
    wire_layout,
)
from dcp_connector.health import RankHealth, RankWatch
from dcp_connector.httpd import MAX_CONNECTIONS, HttpServer, text
from dcp_connector.params import parse
from dcp_connector.pulls import plan_write
from dcp_connector.requests_decode import Ask, DecodeRequests
from dcp_connector.requests_prefill import PrefillRequests, Write, Written
from dcp_connector.units import LayoutError
from dcp_connector.wire import Channel, Done, Failed, Layout, Page, Pull, Settled
from tests.fuzz.mutations import Mutator
from tests.support.transfer_messages import ENGINE, a_cancel, a_hold, a_load, a_pull, a_release

SECRET = b"the secret of the fuzzer"


class Target(Protocol):
    """One decoder, or what stands behind one."""

    def feed(self) -> bool:
        """Make an input and feed it. Return whether it was taken; raises whatever nobody promised."""
        ...

    def sizes(self) -> Mapping[str, tuple[int, int]]:
        """Return what could grow: name -> (size, bound)."""
        ...

    def close(self) -> None:
        """Stop what runs."""
        ...


class _Plain:
    """A target that keeps nothing."""

    def sizes(self) -> Mapping[str, tuple[int, int]]:
        return {}

    def close(self) -> None:
        return


def _in_words(call: Callable[[], object], *refusals: type[Exception]) -> str:
    """Return the words of a refusal, or nothing if the call went through. Lets all other exceptions pass."""
    try:
        call()
    except refusals as error:
        return str(error) or "a refusal without words"
    return ""


def messages() -> list[Any]:
    """One message of each kind."""
    pull = a_pull()
    return [
        pull,
        a_cancel(pull),
        a_release(),
        wire.Grant("pull", (4096, 8192), 1024),
        wire.Taken("pull", 3),
        Done("pull", 5),
        Failed("pull", Reason.TRANSFER_ERROR, "words", 30.0),
        Settled("pull"),
        wire.Want("pull", 1024),
        wire.Chunk("pull", 3),
    ]


class Frames:
    """`Channel.open`: frames with changed bytes, and sealed frames whose payload was changed before it was signed."""

    def __init__(self, rng: random.Random) -> None:
        self.mutate = Mutator(rng)
        self.now = 1.8e9
        numbers = itertools.count()
        self.channel = Channel(SECRET, lambda: self.now, lambda: next(numbers).to_bytes(16, "big"))
        self.payloads = [msgspec.msgpack.encode(message) for message in messages()]
        self.frames = [self.channel.seal(message) for message in messages()]

    def feed(self) -> bool:
        self.now += 0.01
        frame = self._frame()
        return not _in_words(lambda: self.channel.open(frame), WireError)

    def _frame(self) -> bytes:
        rng = self.mutate.rng
        match rng.randint(0, 9):
            case 0:
                return self.mutate.noise()
            case 1 | 2 | 3:
                return self.mutate.bytes(rng.choice(self.frames), self.frames)
            case 4 | 5:
                return self.sealed(self.mutate.bytes(rng.choice(self.payloads), self.payloads))
            case _:
                value = msgspec.msgpack.decode(rng.choice(self.payloads), strict=False)
                try:
                    return self.sealed(msgspec.msgpack.encode(self.mutate.value(value)))
                except (OverflowError, RecursionError):
                    return self.mutate.noise()

    def sealed(self, payload: bytes) -> bytes:
        """Return an authentic frame around a payload that may be anything."""
        header = wire._HEADER.pack(
            wire._MAGIC, wire.PROTOCOL_VERSION, int(self.now * 1000), self.mutate.rng.randbytes(16)
        )
        return header + wire._mac(SECRET, header, payload) + payload

    def sizes(self) -> Mapping[str, tuple[int, int]]:
        # They are remembered for twice the age that is accepted, and an input takes a hundredth of a second.
        return {"remembered nonces": (len(self.channel._seen), int(2 * wire.MAX_AGE_S / 0.01) + 1000)}

    def close(self) -> None:
        return


class States:
    """Both state machines: authentic messages of any content, in any order, while time runs."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.side = SideLayout(1, 1, 16, 16, 1)
        self.pages = {"layer": page_layout(_page(16), self.side)}
        self.prefill = PrefillRequests(ENGINE, 0, 20.0, partial(admit, side=self.side, tp_rank=0))
        self.decode = DecodeRequests(10.0, 1.0, 30.0)
        self.writing: list[tuple[str, str]] = []
        self.held = 0

    def feed(self) -> bool:
        rng, self.now = self.rng, self.now + self.rng.choice((0.0, 0.01, 0.1))
        number = rng.randrange(400)
        transfer = f"t{number}" if rng.random() < 0.8 else f"u{rng.getrandbits(64)}"
        pull = self._pull(transfer, f"p{number}")
        match rng.randint(0, 9):
            case 0 | 1 | 2:
                actions = self.prefill.pull(rng.randbytes(4), pull, self.now)
            case 3:
                actions = self.prefill.cancel(rng.randbytes(4), a_cancel(pull), self.now)
            case 4:
                actions = self.prefill.release(a_release(transfer, prefill_rank=rng.randrange(2)), self.now)
            case 5:
                self.held += 1
                actions = self.prefill.hold(a_hold(transfer, f"r{self.held}", rng.randint(1, 70)), self.now)
            case 6 if self.writing:
                transfer, pull_id = self.writing.pop(rng.randrange(len(self.writing)))
                failure = rng.choice((None, PeerError(Reason.TRANSFER_ERROR, "")))
                actions = self.prefill.written(transfer, pull_id, Written(1, failure), self.now)
            case 7:
                self._decode(number)
                actions = []
            case _:
                actions = self.prefill.tick(self.now)
                self.decode.tick(self.now)
        for action in actions:
            if isinstance(action, Write):
                self.writing.append((action.pull.transfer_id, action.pull.pull_id))
                self._plan(action)
        return bool(actions)

    def _plan(self, write: Write) -> None:
        _in_words(lambda: self._bind(write), PeerError, BindError, LayoutError)

    def _bind(self, write: Write) -> None:
        plan = plan_write(write.pull, write.hold.block_ids, self.pages, self.side, 0, whole_pages=False)
        heads = plan.src_heads, plan.dst_heads
        for _ in bind_layers(plan.runs, plan.src_table, plan.dst_table, plan.pages, *heads):
            pass

    def _pull(self, transfer: str, pull_id: str) -> Pull:
        rng = self.rng
        sizes = [rng.choice((1, 1, 2, 3, 4, 16, 16, 2**20)) for _ in range(5)]
        layout = Layout(*sizes) if rng.random() < 0.3 else Layout(2, 2, rng.choice((1, 16)), 16, 1)
        return a_pull(
            pull_id,
            transfer_id=transfer,
            prefill_rank=rng.choice((0, 0, 0, 1, 2**40)),
            decode_rank=rng.choice((0, 1, 5, 2**40)),
            budget_s=rng.choice((0.0, 5.0, 1e6)),
            start=rng.choice((0, 16, 32, 2**40)),
            end=rng.choice((1, 3, 70, 2**40)),
            decode_stages=rng.choice((1, 1, 1, 2, 1024)),
            layout=layout,
            block_table=rng.randbytes(8 * rng.randint(0, 4)) if rng.random() < 0.5 else a_pull().block_table,
            pages={"layer": _page(rng.choice((16, 16, 1, 2**40)))} if rng.random() < 0.8 else {},
        )

    def _decode(self, number: int) -> None:
        request, pull_id = f"d{number}", f"p{number}"
        answers: list[Callable[[], object]] = [
            lambda: self.decode.load(a_load(request, f"t{number}"), self.now),
            lambda: self.decode.resolved(request, (Ask("tcp://a:1", a_pull(pull_id)),), self.now),
            lambda: self.decode.done(Done(pull_id, 1), self.now),
            lambda: self.decode.failed(Failed(pull_id, Reason.INTERNAL, "", self.rng.choice((0.0, 1e6))), self.now),
            lambda: self.decode.settled(Settled(pull_id), self.now),
            lambda: self.decode.abort(request, self.now),
            lambda: self.decode.peer_lost("tcp://a:1", "", self.now),
            lambda: self.decode.gone("tcp://a:1", self.now),
        ]
        self.rng.choice(answers)()

    def sizes(self) -> Mapping[str, tuple[int, int]]:
        prefill, decode = self.prefill, self.decode
        return {
            "transfers": (len(prefill._transfers), requests_prefill.MAX_WAITING),
            # A lease of 20 s is some 600 inputs.
            "ended transfers": (len(prefill._ended), 1000),
            "pulls of a transfer": (max((len(t.asks) for t in prefill._transfers.values()), default=0), 400),
            "cancels of unknown pulls": (len(prefill._given_up), requests_prefill.MAX_WAITING),
            "timers of prefill": (len(prefill._timers), 100_000),
            "loads": (decode.num_loading + decode.num_unclear, 400),
            "pulls": (len(decode._pulls), 400),
            "timers of decode": (len(decode._timers), 10_000),
        }

    def close(self) -> None:
        return


class Params(_Plain):
    """`params.parse`: what routers and clients write into `kv_transfer_params`."""

    def __init__(self, rng: random.Random) -> None:
        self.mutate = Mutator(rng)
        self.seeds: list[Any] = [
            {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer"},
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_bootstrap_addr": "http://10.0.0.2:8998",
                "remote_engine_id": "engine",
                "transfer_id": "xfer",
                "remote_num_tokens": 70,
            },
        ]

    def feed(self) -> bool:
        given = self.mutate.value(self.mutate.rng.choice(self.seeds))
        address = self.seeds[1]["remote_bootstrap_addr"].encode()
        if isinstance(given, dict) and self.mutate.rng.random() < 0.3:
            changed = self.mutate.bytes(address, (address,)).decode("utf-8", "replace")
            given = {**given, "remote_bootstrap_addr": changed}
        words = _in_words(lambda: parse(given), ParamsError)
        assert words.isascii()
        assert len(words) < 500
        return not words


def a_topology() -> Topology:
    facts = SideFacts(
        "engine", "kv_producer", "hash", "tiny", "uint8", "rows", wire_layout(SideLayout(2, 1, 16, 16, 2)), 1
    )
    ranks = [RankFacts(facts, rank, 0, f"tcp://10.0.0.{rank}:1", {"layer": _page(16)}) for rank in range(2)]
    return assemble("generation", ranks)


class Topologies(_Plain):
    """`decode_topology`, and the comparison of what it lets through with this engine's own facts."""

    def __init__(self, rng: random.Random) -> None:
        self.mutate = Mutator(rng)
        self.body = encode_topology(a_topology())
        self.value = json.loads(self.body)
        layout = wire_layout(SideLayout(2, 1, 16, 16, 2))
        side = SideFacts("decode", "kv_consumer", "hash", "tiny", "uint8", "rows", layout, 1)
        self.mine = RankFacts(side, 0, 0, "", {"layer": _page(16)})

    def feed(self) -> bool:
        if self.mutate.rng.random() < 0.4:
            body = self.mutate.bytes(self.body, (self.body,))
        else:
            body = json.dumps(self.mutate.value(self.value), default=repr).encode()
        return not _in_words(lambda: self._compare(body), PeerError)

    def _compare(self, body: bytes) -> None:
        mismatches = find_mismatches(decode_topology(body), self.mine)
        if mismatches:
            raise PeerError(Reason.INCOMPATIBLE, "; ".join(mismatches))


class _Crashes(logging.Handler):
    """Collects what a connection's thread raised: the server only logs it, and the client sees a closed connection."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []
        self.logger = logging.getLogger(httpd.__name__)
        self.before = self.logger.level, self.logger.propagate
        self.logger.setLevel(logging.DEBUG)
        self.logger.propagate = False
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        # That a client is gone or too slow is promised to end its connection, and nothing else is.
        if error is not None and not isinstance(error, OSError):
            self.errors.append(error)

    def restore(self) -> None:
        self.logger.removeHandler(self)
        self.logger.level, self.logger.propagate = self.before


class Http:
    """Both HTTP servers, the engine's (`bootstrap`) and a rank's (`health`): bytes that are nearly a request.

    The engine's asks the rank's, and a stand-in for vLLM's own server, as it does in a pod.
    """

    def __init__(self, rng: random.Random) -> None:
        self.mutate = Mutator(rng)
        self.crashes = _Crashes()
        failures = FailureLog(lambda: 1.8e9)
        failures.add(Reason.INCOMPATIBLE, "prefill engine 'ä' doesn't fit")
        self.api = HttpServer("127.0.0.1", 0, lambda _: text(200, "ok"), "fuzz-api")
        self.rank = RankHealth("127.0.0.1", list, failures.entries)
        self.server = BootstrapServer(0, self.api.port, SECRET, serves_query=True)
        watch = RankWatch({"rank tp 0 pp 0": self.rank.address})
        self.server.publish(a_topology(), watch.problems, watch.failures)
        self.threads = threading.active_count()
        rank_port = int(self.rank.address.rpartition(":")[2])
        #: what is asked for, by port: each of these answers 200
        self.good = {
            self.server.port: [
                _get(path) for path in ("/query", "/v1/topology", "/healthz", "/readyz", "/v1/failures")
            ],
            rank_port: [_get(path) for path in ("/healthz", "/v1/failures")],
        }
        self.seeds = [
            seed.replace(b"GET", method) for seed in self.good[self.server.port] for method in (b"GET", b"HEAD")
        ]
        self.seeds += [_get("/nothing"), b"POST /query HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody"]

    def feed(self) -> bool:
        rng = self.mutate.rng
        # A rank's server is the same code with fewer paths.
        port = rng.choices(list(self.good), (3, 1))[0]
        sent = self.mutate.noise() if rng.random() < 0.1 else self.mutate.bytes(rng.choice(self.seeds), self.seeds)
        answer = self._exchange(port, sent)
        if rng.random() < 0.01:
            asked = rng.choice(self.good[port])
            assert self._exchange(port, asked).startswith(b"HTTP/1.1 200 "), f"{asked!r} is answered no longer"
        if self.crashes.errors:
            raise self.crashes.errors[0]
        return answer.startswith(b"HTTP/1.1 200 ")

    def _exchange(self, port: int, sent: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            try:
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                answer = b""
                while part := sock.recv(65536):
                    answer += part
            except (ConnectionResetError, BrokenPipeError):
                return b""
        return answer

    def sizes(self) -> Mapping[str, tuple[int, int]]:
        return {"threads": (threading.active_count() - self.threads, MAX_CONNECTIONS)}

    def close(self) -> None:
        for server in (self.server, self.rank, self.api):
            server.close()
        self.crashes.restore()


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()


def _page(rows: int) -> Page:
    return Page(4096, 8, rows, 512, 512, 32, 32)


TARGETS: Mapping[str, Callable[[random.Random], Target]] = {
    "frames": Frames,
    "states": States,
    "params": Params,
    "topology": Topologies,
    "http": Http,
}
