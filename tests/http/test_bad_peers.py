"""Peers that lie, die, freeze or talk nonsense: the request ends with a reason, and the worker serves the next one."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import zmq

from dcp_connector import bootstrap
from dcp_connector.bootstrap import BootstrapServer
from dcp_connector.errors import ConnectorError, Reason, StartupError
from dcp_connector.handshake import assemble
from dcp_connector.requests_decode import Load
from dcp_connector.transfer import TransferError
from dcp_connector.wire import sign, token_digest
from dcp_connector.work import StepWork
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import HOST, SECRET, Engine, MemoryTransport, engine, prompt, wait_for

PREFILL, DECODE = Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1)
TOKENS = 70
P_TABLE, D_TABLE = [3, 9, 1, 7, 12], [5, 2, 8]


@contextmanager
def both(
    *, prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None
) -> Iterator[tuple[Engine, Engine]]:
    with engine("kv_producer", PREFILL, **(prefill or {})) as p, engine("kv_consumer", DECODE, **(decode or {})) as d:
        yield p, d


def transfer(p: Engine, d: Engine, transfer_id: str) -> tuple[list[Reason | None], set[int]]:
    p.hold(transfer_id, TOKENS, P_TABLE)
    d.load(transfer_id, TOKENS, D_TABLE, p.origin, p.engine_id)
    return d.received(transfer_id)


def works(p: Engine, d: Engine, transfer_id: str = "after") -> None:
    """A transfer between the two succeeds, byte for byte."""
    before = d.snapshot()
    assert transfer(p, d, transfer_id) == ([None, None], set())
    assert d.differing_bytes(before, D_TABLE, TOKENS) == [0, 0]
    assert p.sent(transfer_id) == [None]


def fails(d: Engine, origin: str, reason: Reason, *, engine_id: str | None = None, within_s: float = 10.0) -> None:
    """A load from `origin` ends with `reason` on both ranks, with all of its blocks given up."""
    d.load("bad", TOKENS, D_TABLE, origin, engine_id)
    assert d.received("bad", within_s) == ([reason, reason], set(D_TABLE))


def fails_unclear(d: Engine, request_id: str, reason: Reason, within_s: float = 10.0) -> None:
    """A load ends with `reason` on both ranks, and its blocks are kept out of use."""
    assert d.received(request_id, within_s) == ([reason, reason], set())
    assert d.ever_unclear[request_id] == 2


@contextmanager
def http_answering(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def tcp_answering(answer: bytes) -> Iterator[str]:
    """A server that sends bytes to whoever connects, whatever they say, and hangs up."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://{HOST}:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def signed(body: bytes) -> dict[str, str]:
    return {"X-DCP-Signature": sign(SECRET, body)}


def test_a_transfer_between_healthy_peers_works() -> None:
    with both() as (p, d):
        works(p, d)


@pytest.mark.parametrize(
    ("body", "status", "headers", "reason"),
    [
        (b"<html>hello</html>", 200, {}, Reason.BOOTSTRAP_GARBAGE),
        (os.urandom(5000), 200, {}, Reason.BOOTSTRAP_GARBAGE),
        (b"", 200, {}, Reason.BOOTSTRAP_GARBAGE),
        (b"{}", 200, signed(b"{}"), Reason.BOOTSTRAP_GARBAGE),
        (b'{"protocol": 2}', 200, signed(b'{"protocol": 2}'), Reason.BOOTSTRAP_GARBAGE),
        (b'{"protocol": 1}', 200, signed(b'{"protocol": 1}'), Reason.INCOMPATIBLE),
        (b"[" * 100_000, 200, signed(b"[" * 100_000), Reason.BOOTSTRAP_GARBAGE),
        (b"no", 404, {}, Reason.BOOTSTRAP_GARBAGE),
        (b"soon", 503, {}, Reason.BOOTSTRAP_UNREACHABLE),
        (b"", 302, {"Location": "http://127.0.0.1:1/"}, Reason.BOOTSTRAP_GARBAGE),
    ],
    ids=["html", "noise", "nothing", "empty object", "half", "other version", "deep", "404", "503", "redirect"],
)
def test_a_bootstrap_port_that_answers_garbage(
    body: bytes, status: int, headers: dict[str, str], reason: Reason
) -> None:
    with both() as (p, d), http_answering(body, status, headers) as origin:
        fails(d, origin, reason)
        works(p, d)


@pytest.mark.parametrize(
    "answer", [b"", b"\x00\xff" * 100, b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: zz\r\n\r\n"]
)
def test_a_bootstrap_port_that_does_not_speak_http(answer: bytes) -> None:
    with both() as (p, d), tcp_answering(answer) as origin:
        d.load("bad", TOKENS, D_TABLE, origin, None)
        reasons, failed = d.received("bad")
        assert set(reasons) <= {Reason.BOOTSTRAP_GARBAGE, Reason.BOOTSTRAP_UNREACHABLE}
        assert failed == set(D_TABLE)
        works(p, d)


def test_the_null_block_is_never_reported_as_failed() -> None:
    with both() as (p, d):
        d.load("bad", TOKENS, [0, 2, 8], f"http://{HOST}:1", None)
        assert d.received("bad") == ([Reason.BOOTSTRAP_UNREACHABLE] * 2, {2, 8})
        works(p, d)


def test_a_bootstrap_port_where_nobody_listens() -> None:
    with both() as (p, d):
        fails(d, f"http://{HOST}:1", Reason.BOOTSTRAP_UNREACHABLE)
        works(p, d)


def test_many_requests_to_a_silent_address_cost_one_timeout_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bootstrap.fetch_topology
    monkeypatch.setattr("dcp_connector.peers.fetch_topology", lambda origin, secret: real(origin, secret, 1.0))
    with both() as (p, d), socket.create_server((HOST, 0)) as silent:
        origin = f"http://{HOST}:{silent.getsockname()[1]}"
        started = time.monotonic()
        loads = [
            Load(f"r{n}", f"t{n}", origin, None, tuple(D_TABLE), 0, TOKENS, token_digest(prompt(TOKENS), ""))
            for n in range(6)
        ]
        d.start(StepWork(loads=loads))
        seen: list[set[str]] = [set(), set()]

        def all_reported() -> bool:
            for number, worker in enumerate(d.workers):
                seen[number] |= worker.finished()[1]
            return all(len(ids) == len(loads) for ids in seen)

        wait_for(all_reported, 10, f"only {seen} were reported")
        assert time.monotonic() - started < 3
        for worker in d.workers:
            worker.take_report()
            worker.take_failed_blocks()
        works(p, d)


def test_an_engine_of_another_deployment_is_not_believed() -> None:
    with both() as (p, d), engine("kv_producer", PREFILL, secret=b"another deployment's") as stranger:
        fails(d, stranger.origin, Reason.BOOTSTRAP_GARBAGE)
        works(p, d)


def test_an_engine_id_that_the_router_remembers_from_before_a_restart() -> None:
    with both() as (p, d):
        started = time.monotonic()
        fails(d, p.origin, Reason.STALE_ENGINE_ID, engine_id="before the restart")
        assert time.monotonic() - started < 3
        works(p, d)


def test_prefill_that_restarts_at_the_same_address_serves_the_next_request() -> None:
    with engine("kv_consumer", DECODE, cancel_grace_s=0.5) as d:
        with engine("kv_producer", PREFILL) as before:
            works(before, d, "before")
            port = before.bootstrap.port
        with engine("kv_producer", PREFILL, port=port) as after:
            fails(d, after.origin, Reason.STALE_ENGINE_ID, engine_id=before.engine_id)
            works(after, d)


def test_the_same_side_twice_is_refused_by_role() -> None:
    with both() as (p, d), engine("kv_consumer", DECODE) as other:
        fails(d, other.origin, Reason.INCOMPATIBLE)
        works(p, d)


def test_another_model_is_refused_and_prefill_gets_its_blocks_back() -> None:
    with both(prefill={"facts": {"model_hash": "another"}}) as (p, d):
        assert transfer(p, d, "refused") == ([Reason.INCOMPATIBLE] * 2, set(D_TABLE))
        assert p.sent("refused") == [Reason.RELEASED]


@contextmanager
def zmq_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context that closes its sockets whatever happens: left to the collector, it would wait for them for ever."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


def test_noise_on_the_control_port_is_dropped_and_counted() -> None:
    with both() as (p, d), zmq_context() as context:
        address = p.workers[0].facts.control  # type: ignore[union-attr]
        sock = context.socket(zmq.DEALER)
        sock.connect(address)
        for noise in (b"", b"x", os.urandom(61), os.urandom(10_000), b"DKV\x01" + bytes(200)):
            sock.send(noise)
        sock.send_multipart([b"a", b"b", b"c"])
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(os.urandom(2000))
        wait_for(lambda: (p.counters[0].take() or {}).get("dropped_messages", 0) > 0, 5, "nothing was counted")
        works(p, d)


def test_a_flood_on_the_control_port_is_taken_in_portions() -> None:
    with both() as (p, _d), zmq_context() as context:
        prefill = p.workers[0]._prefill
        assert prefill
        prefill._loop.close()
        sock = context.socket(zmq.DEALER)
        sock.connect(prefill.address)
        for _ in range(300):
            sock.send(b"noise")
        taken: list[int] = []
        while sum(taken) < 300:
            assert prefill._socket.poll(5000), f"only {taken} were taken"
            prefill._receive()
            taken.append((p.counters[0].take() or {}).get("dropped_messages", 0))
        assert max(taken) <= 64


@contextmanager
def control_port_answering_noise() -> Iterator[str]:
    """A ROUTER that answers every message with noise."""
    stop = threading.Event()
    with zmq_context() as context:
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port(f"tcp://{HOST}")

        def babble() -> None:
            while not stop.is_set():
                if router.poll(50):
                    identity, *_ = router.recv_multipart()
                    router.send_multipart([identity, os.urandom(200)])
                    router.send_multipart([identity, b"a", b"b"])

        thread = threading.Thread(target=babble)
        thread.start()
        try:
            yield f"tcp://{HOST}:{port}"
        finally:
            stop.set()
            thread.join()


def test_a_control_port_that_answers_noise_ends_the_request_by_its_deadline() -> None:
    decode = {"request_timeout_s": 1.0, "cancel_grace_s": 0.5}
    with both(decode=decode) as (p, d), control_port_answering_noise() as address:
        facts = p.workers[0].facts
        assert facts
        fake = BootstrapServer(0, 1, SECRET, serves_query=True)
        try:
            fake.publish(assemble("g", [type(facts)(facts.side, 0, 0, address, facts.pages)]))
            started = time.monotonic()
            d.load("bad", TOKENS, D_TABLE, f"http://{HOST}:{fake.port}", None)
            fails_unclear(d, "bad", Reason.DEADLINE)
            assert time.monotonic() - started < 4
        finally:
            fake.close()
        works(p, d)


def pulls_have_arrived(p: Engine, count: int) -> None:
    """Wait until the first prefill rank has this many pulls."""
    requests = p.workers[0]._prefill._requests  # type: ignore[union-attr]

    def arrived() -> bool:
        return sum(len(transfer.asks) for transfer in list(requests._transfers.values())) == count

    wait_for(arrived, 10, "the pulls did not arrive")


def test_prefill_that_dies_before_it_writes_ends_the_request_long_before_the_deadline() -> None:
    with engine("kv_consumer", DECODE, request_timeout_s=60.0, cancel_grace_s=0.5) as d:
        with engine("kv_producer", PREFILL) as p:
            d.load("orphan", TOKENS, D_TABLE, p.origin, p.engine_id)
            pulls_have_arrived(p, 2)
        fails_unclear(d, "orphan", Reason.PEER_LOST)
        # The address refuses connections: the process has ended, so nothing is written any more.
        d.cleared("orphan")


def test_hanging_up_ends_the_requests_that_wait_on_that_line() -> None:
    with both(decode={"request_timeout_s": 60.0, "cancel_grace_s": 0.5}) as (p, d):
        d.load("waiting", TOKENS, D_TABLE, p.origin, p.engine_id)
        pulls_have_arrived(p, 2)
        for worker in d.workers:
            decode, address = worker._decode, p.workers[0]._prefill.address  # type: ignore[union-attr]
            assert decode
            decode._loop.call(partial(decode._hang_up, address))
        assert d.received("waiting")[0] == [Reason.PEER_LOST] * 2
        # Prefill lives, hears a Cancel on the next line, and confirms, sooner or later.
        d.cleared("waiting")


def test_a_prompt_that_never_comes_ends_the_request_at_its_deadline() -> None:
    with both(decode={"request_timeout_s": 0.5}) as (p, d):
        started = time.monotonic()
        fails(d, p.origin, Reason.DEADLINE)
        assert 0.4 < time.monotonic() - started < 3
        works(p, d)


def test_an_aborted_prompt_ends_the_waiting_request_at_once() -> None:
    with both() as (p, d):
        d.load("aborted", TOKENS, D_TABLE, p.origin, p.engine_id)
        pulls_have_arrived(p, 2)
        p.start(StepWork(drops=[("aborted", Reason.PREFILL_ABORTED)]))
        assert d.received("aborted") == ([Reason.PREFILL_ABORTED] * 2, set(D_TABLE))
        works(p, d)


def test_a_client_that_leaves_while_decode_waits_frees_both_sides() -> None:
    with both() as (p, d):
        d.load("gone", TOKENS, D_TABLE, p.origin, p.engine_id)
        pulls_have_arrived(p, 2)
        d.start(StepWork(aborts=["gone"]))
        assert d.received("gone") == ([Reason.CANCELLED] * 2, set())
        p.hold("gone", TOKENS, P_TABLE)
        assert p.sent("gone") == [Reason.CANCELLED]
        works(p, d)


def test_a_client_that_leaves_during_a_write_frees_the_blocks_only_when_it_has_stopped() -> None:
    began, gate = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        began.release()
        gate.wait(5)

    slow = {"transport": lambda: MemoryTransport(wait), "max_batch_descriptors": 1, "path": "direct"}
    with both(prefill=slow) as (p, d):
        p.hold("gone", TOKENS, P_TABLE)
        d.load("gone", TOKENS, D_TABLE, p.origin, p.engine_id)
        assert began.acquire(timeout=5)
        assert began.acquire(timeout=5)
        d.start(StepWork(aborts=["gone"]))
        time.sleep(0.3)
        assert [worker.finished()[1] for worker in d.workers] == [set(), set()]
        gate.set()
        assert d.received("gone") == ([Reason.CANCELLED] * 2, set())
        assert p.sent("gone") == [Reason.CANCELLED]
        assert sum(len(transport.batches) for transport in p.transports) <= 2 * 2
        works(p, d)


def test_a_frozen_writer_holds_up_the_request_no_longer_than_the_grace_and_its_blocks_until_it_stopped() -> None:
    gate = threading.Event()
    frozen = {"transport": lambda: MemoryTransport(lambda: gate.wait(20)), "max_batch_descriptors": 1, "path": "direct"}
    with both(prefill=frozen, decode={"request_timeout_s": 0.5, "cancel_grace_s": 0.5}) as (p, d):
        p.hold("frozen", TOKENS, P_TABLE)
        d.load("frozen", TOKENS, D_TABLE, p.origin, p.engine_id)
        started = time.monotonic()
        fails_unclear(d, "frozen", Reason.DEADLINE)
        assert time.monotonic() - started < 3
        for _ in range(5):
            assert [worker.finished() for worker in d.workers] == [(set(), set())] * 2
            assert not any(d.note(worker).cleared for worker in d.workers), "cleared while a batch is in flight"
        gate.set()
        d.cleared("frozen")
        p.sent("frozen")
        assert sum(p.transports[0].batches) <= 2
        works(p, d)


def test_a_failed_write_ends_the_request_and_keeps_its_blocks_while_parts_may_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise TransferError("no")

    monkeypatch.setattr("dcp_connector.sender.STRAGGLERS_S", 0.5)
    with both(prefill={"transport": lambda: MemoryTransport(broken)}) as (p, d):
        p.hold("broken", TOKENS, P_TABLE)
        d.load("broken", TOKENS, D_TABLE, p.origin, p.engine_id)
        started = time.monotonic()
        fails_unclear(d, "broken", Reason.TRANSFER_ERROR)
        d.cleared("broken")
        assert time.monotonic() - started >= 0.5, "parts of the batch might still have arrived"
        assert p.sent("broken") == [Reason.TRANSFER_ERROR]
        p.transports[0].before_write = lambda: None
        works(p, d)


def test_a_transfer_id_of_another_prompt_never_yields_its_kv() -> None:
    with both() as (p, d):
        p.hold("shared", TOKENS + 1, P_TABLE)
        before = d.snapshot()
        d.load("shared", TOKENS, D_TABLE, p.origin, p.engine_id)
        # The first TOKENS tokens are the same prompt, so that much may be read ...
        assert d.received("shared")[0] == [None, None]
        assert d.differing_bytes(before, D_TABLE, TOKENS) == [0, 0]
        p.sent("shared")
        before = d.snapshot()
        p.hold("short", TOKENS - 1, P_TABLE)
        # ... but never tokens that prefill did not compute.
        d.load("short", TOKENS, D_TABLE, p.origin, p.engine_id)
        assert d.received("short")[0] == [Reason.SHORT_PROMPT] * 2
        assert [(rank.memory != old).any() for rank, old in zip(d.ranks, before, strict=True)] == [False, False]


def test_kv_of_other_tokens_under_the_same_id_is_refused_and_the_blocks_stay_for_their_owner() -> None:
    with both() as (p, d):
        before = d.snapshot()
        p.hold("shared", TOKENS, P_TABLE)
        work = StepWork(
            loads=[
                Load("shared", "shared", p.origin, p.engine_id, tuple(D_TABLE), 0, TOKENS, token_digest(b"others", ""))
            ]
        )
        d.start(work)
        assert d.received("shared")[0] == [Reason.OTHER_PROMPT] * 2
        assert [(rank.memory != old).any() for rank, old in zip(d.ranks, before, strict=True)] == [False, False]
        d.load("shared", TOKENS, D_TABLE, p.origin, p.engine_id)
        assert d.received("shared") == ([None, None], set())
        assert p.sent("shared") == [None]


def test_block_ids_outside_the_cache_are_refused_before_anything_is_written() -> None:
    with both() as (p, d):
        before = d.snapshot()
        p.hold("wild", TOKENS, P_TABLE)
        d.load("wild", TOKENS, [5, 2, 10_000], p.origin, p.engine_id)
        assert d.received("wild")[0] == [Reason.OUT_OF_BOUNDS] * 2
        assert p.sent("wild") == [Reason.OUT_OF_BOUNDS]
        assert [(rank.memory != old).any() for rank, old in zip(d.ranks, before, strict=True)] == [False, False]
        works(p, d)


def test_twenty_orphans_on_prefill_do_not_hold_up_anyone() -> None:
    with both(decode={"cancel_grace_s": 0.5}) as (p, d):
        for number in range(20):
            d.load(f"orphan-{number}", TOKENS, D_TABLE, p.origin, p.engine_id)
        with engine("kv_consumer", DECODE) as other:
            started = time.monotonic()
            works(p, other)
            assert time.monotonic() - started < 2


def test_a_prompt_shorter_than_the_interleave_leaves_a_rank_with_nothing_and_still_ends_on_all() -> None:
    with engine("kv_producer", PREFILL) as p, engine("kv_consumer", Sizes(2, 2, 16, 16, 1)) as d:
        before = d.snapshot()
        p.hold("short", 5, P_TABLE)
        d.load("short", 5, D_TABLE, p.origin, p.engine_id)
        assert d.received("short") == ([None, None], set())
        assert d.differing_bytes(before, D_TABLE, 5) == [0, 0]
        assert p.sent("short") == [None]


def test_a_full_local_hit_gives_prefills_blocks_back_at_once() -> None:
    with both() as (p, d):
        p.hold("hit", TOKENS, P_TABLE)
        d.start(StepWork(releases=[("hit", p.origin, p.engine_id)]))
        assert p.sent("hit") == [Reason.RELEASED]


def test_prefill_ranks_that_serve_nobody_give_their_blocks_back() -> None:
    with engine("kv_producer", Sizes(4, 1, 16, 16, 1)) as p, engine("kv_consumer", Sizes(1, 1, 16, 16, 1)) as d:
        p.hold("few", TOKENS, P_TABLE)
        d.load("few", TOKENS, P_TABLE, p.origin, p.engine_id)
        assert d.received("few") == ([None], set())
        assert sorted(map(str, p.sent("few"))) == ["None", "released", "released", "released"]


def test_each_pipeline_stage_of_prefill_writes_its_own_layers() -> None:
    with engine("kv_producer", Sizes(2, 1, 16, 16, 1), stages=2) as p, engine("kv_consumer", DECODE) as d:
        before = d.snapshot()
        p.hold("staged", TOKENS, P_TABLE)
        d.load("staged", TOKENS, D_TABLE, p.origin, p.engine_id)
        assert d.received("staged") == ([None, None], set())
        assert d.differing_bytes(before, D_TABLE, TOKENS) == [0, 0]
        assert set(p.sent("staged")) <= {None, Reason.RELEASED}


def test_a_connector_whose_thread_died_ends_the_engine_instead_of_hanging_requests() -> None:
    with both() as (p, d):
        d.workers[0]._decode._loop.close()  # type: ignore[union-attr]
        with pytest.raises(ConnectorError, match="The engine must restart"):
            d.workers[0].finished()
        assert p.workers[0].finished() == (set(), set())


def test_staging_that_cannot_hold_one_token_refuses_to_start() -> None:
    with (
        pytest.raises(StartupError, match="raise staging_bytes or lower transfer_threads"),
        engine("kv_producer", PREFILL, entry_bytes=32768, staging_bytes=1 << 20, transfer_threads=64, num_blocks=2),
    ):
        pass
