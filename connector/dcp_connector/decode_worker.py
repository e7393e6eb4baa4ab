"""The decode half of a worker: one thread that asks prefill ranks for KV and drives `DecodeRequests`."""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import zmq

from dcp_connector.errors import PeerError, Reason, WireError
from dcp_connector.failures import FailureLog
from dcp_connector.loop import Loop
from dcp_connector.peers import Peer, PeerBook, plan_asks, releases_to_all_ranks, releases_to_idle_ranks
from dcp_connector.receiver import Answer, Receiver
from dcp_connector.requests_decode import (
    Abandon,
    Action,
    Cleared,
    DecodeRequests,
    Finished,
    Load,
    Probe,
    Resolve,
    Send,
    with_budget,
)
from dcp_connector.sockets import Line, is_refused
from dcp_connector.transfer import LONGEST_WRITE_S
from dcp_connector.units import LayoutError
from dcp_connector.wire import MAX_AGE_S, Cancel, Channel, Chunk, Done, Failed, Message, Settled, Want

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcp_connector.config import ConnectorConfig
    from dcp_connector.geometry import SideLayout
    from dcp_connector.handshake import RankFacts
    from dcp_connector.staging import Staging
    from dcp_connector.stats import Counters
    from dcp_connector.wire import Secret

logger = logging.getLogger(__name__)

#: Threads that ask bootstrap servers. A dead address holds one for a few seconds.
_RESOLVERS = 8
#: Threads that probe addresses of lost peers; each probe takes 2 s at most.
_PROBERS = 2
#: Messages of a peer that are taken in one go, and how often refused ones are logged.
_PORTION = 64
_LOG_EVERY_S = 10.0
#: How long after decode's deadline a writer may write at most. It counts its own deadline from when it gets the pull,
#: which is accepted up to `MAX_AGE_S` late, by clocks that may differ as much; before that it may begin a last batch.
_LONGEST_WRITE_S = 2 * MAX_AGE_S + LONGEST_WRITE_S


class DecodeWorker:
    """Loads KV into this rank's pages."""

    def __init__(
        self,
        *,
        facts: RankFacts,
        layout: SideLayout,
        segment: str,
        config: ConnectorConfig,
        secret: Secret,
        counters: Counters,
        staging: Staging | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self._facts = facts
        self._layout = layout
        self._segment = segment
        self._counters = counters
        self._failures = failures or FailureLog(time.time)
        self._grace_s = config.cancel_grace_s
        self._timeout_s = config.request_timeout_s
        self._requests = DecodeRequests(config.request_timeout_s, config.cancel_grace_s, _LONGEST_WRITE_S)
        self._book = PeerBook(facts, layout, secret, partial(counters.add, "refused_peers"))
        self._channel = Channel(secret, time.time, partial(os.urandom, 16))
        self._finished: deque[Finished | Cleared] = deque()
        self._probing: set[str] = set()
        self._lines: dict[str, Line] = {}
        self._identity = uuid.uuid4().bytes
        self._numbers = itertools.count()
        self._shard = layout.shard_of_rank(facts.tp_rank)
        self._leads = facts.tp_rank == facts.pp_rank == 0
        self._bytes_per_row = layout.heads_per_rank * sum(page.entry_bytes for page in facts.pages.values())
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="dcp-resolve")
        self._probers = ThreadPoolExecutor(_PROBERS, thread_name_prefix="dcp-probe")
        self._last_log = float("-inf")
        self._loop = Loop("dcp-decode", self._next_timer, self._tick)
        self._receiver = Receiver(
            staging, config.transfer_threads, counters, self._loop.call, self._send, self._answered
        )
        self._loop.start()

    def load(self, loads: Sequence[Load]) -> None:
        """Blocks are allocated; fetch their KV. Engine thread."""
        for load in loads:
            self._loop.call(partial(self._load, load))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Clients are gone; stop loading for them. Engine thread."""
        for request_id in request_ids:
            self._loop.call(partial(self._abort, request_id))

    def release(self, releases: Sequence[tuple[str, str, str | None]]) -> None:
        """Transfers (id, bootstrap address, engine id) of which nothing is needed. Engine thread; only rank 0 tells."""
        if self._leads:
            for transfer_id, origin, engine_id in releases:
                self._resolvers.submit(self._release, transfer_id, origin, engine_id, "decode needs nothing")

    def take_finished(self) -> list[Finished | Cleared]:
        """Return loads that are over, and unconfirmed ones whose blocks are clear; each once. Never waits."""
        taken: list[Finished | Cleared] = []
        while self._finished:
            taken.append(self._finished.popleft())
        return taken

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._loop.alive

    @property
    def idle_s(self) -> float:
        """Seconds since the thread last came round."""
        return self._loop.idle_s

    def close(self) -> None:
        """Stop loading."""
        for pool in (self._resolvers, self._probers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._loop.close()
        self._receiver.close()
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    # Everything below runs on the loop's thread, except `_find` and `_release`.

    def _load(self, load: Load) -> None:
        self._act(self._requests.load(load, time.monotonic()))

    def _abort(self, request_id: str) -> None:
        self._act(self._requests.abort(request_id, time.monotonic()))

    def _next_timer(self) -> float | None:
        timers = [line.lost_at + self._grace_s + 1 for line in self._lines.values() if line.lost_at is not None]
        timer = self._requests.next_timer()
        if timer is not None:
            timers.append(timer)
        return min(timers, default=None)

    def _tick(self, now: float) -> None:
        self._act(self._requests.tick(now))
        for address, line in list(self._lines.items()):
            if line.lost_at is not None and line.lost_at + self._grace_s + 1 <= now:
                self._hang_up(address)

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Resolve():
                    peer = self._book.known(action.load.bootstrap_addr, action.load.engine_id)
                    if peer is not None:
                        self._resolved(action.load, peer)
                    else:
                        self._resolvers.submit(self._find, action.load)
                case Send():
                    self._send(action.address, action.message)
                    if isinstance(action.message, Cancel):
                        self._receiver.halt(action.message.pull_id)
                case Abandon():
                    if self._leads:
                        load = action.load
                        self._resolvers.submit(
                            self._release, load.transfer_id, load.bootstrap_addr, load.engine_id, "decode gave up"
                        )
                case Probe():
                    if action.address not in self._probing:
                        self._probing.add(action.address)
                        self._probers.submit(self._probe, action.address)
                case Finished():
                    self._finish(action)
                case Cleared():
                    self._clear(action)

    def _find(self, load: Load) -> None:
        """Look a peer up over the network. Runs on a resolver thread."""
        try:
            peer = self._book.find(load.bootstrap_addr, load.engine_id)
        except PeerError as error:
            refusal = error
        except Exception as error:
            logger.exception("dcp: looking up %s failed unexpectedly", load.bootstrap_addr)
            refusal = PeerError(Reason.INTERNAL, f"{type(error).__name__}: {error}")
        else:
            self._loop.call(partial(self._resolved, load, peer))
            return
        self._loop.call(lambda: self._act(self._requests.unresolved(load.request_id, refusal, time.monotonic())))

    def _probe(self, address: str) -> None:
        """Find out whether a prefill rank's process has ended. Runs on a thread for that."""
        refused = is_refused(address)
        self._loop.call(partial(self._probed, address, refused=refused))

    def _probed(self, address: str, *, refused: bool) -> None:
        self._probing.discard(address)
        if refused:
            self._act(self._requests.gone(address, time.monotonic()))

    def _resolved(self, load: Load, peer: Peer) -> None:
        try:
            asks = plan_asks(peer, load, self._facts, self._layout, self._segment, self._new_id)
        except LayoutError as error:
            refusal = PeerError(Reason.INCOMPATIBLE, str(error))
            self._act(self._requests.unresolved(load.request_id, refusal, time.monotonic()))
            return
        if self._rows(load) == 0:
            # Nothing will be written here, but prefill waits for every rank that it serves: ask, and don't wait.
            for ask in asks:
                self._send(ask.address, with_budget(ask.pull, self._timeout_s))
            asks = ()
        actions = self._requests.resolved(load.request_id, asks, time.monotonic())
        # There are none if the load ended while its peer was looked up: then nothing is asked.
        for ask in asks if actions else ():
            self._receiver.expect(load.request_id, ask.address, ask.pull, peer.layout)
        self._act(actions)
        if self._leads:
            for address, release in releases_to_idle_ranks(peer, load.transfer_id, self._facts, self._layout):
                self._send(address, release)

    def _release(self, transfer_id: str, origin: str, engine_id: str | None, why: str) -> None:
        """Tell all prefill ranks that nothing is needed. Runs on a resolver thread; if it fails, the lease ends it."""
        try:
            topology = self._book.topology(origin, engine_id)
        except PeerError as error:
            logger.info("dcp: could not release transfer %s at %s: %s", transfer_id, origin, error)
            return
        for address, release in releases_to_all_ranks(topology, transfer_id, self._facts, why):
            self._loop.call(partial(self._send, address, release))

    def _send(self, address: str, message: Message) -> None:
        line = self._lines.get(address)
        if line is None:
            try:
                line = Line(address, self._identity)
            except zmq.ZMQError as error:
                self._lose(address, f"{address} is no address that can be connected to: {error}")
                return
            self._lines[address] = line
            self._loop.watch(line.socket, partial(self._receive, address))
            self._loop.watch(line.monitor, partial(self._observe, address))
        try:
            line.socket.send(self._channel.seal(message), zmq.NOBLOCK)
        except (zmq.Again, WireError) as error:
            self._lose(address, f"{address} takes no more messages: {error}")

    def _receive(self, address: str) -> None:
        """Take a portion of what is there, so that no peer keeps the others' messages and the timers waiting."""
        for _ in range(_PORTION):
            line = self._lines.get(address)
            if line is None:
                return
            try:
                frame = line.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._channel.open(frame)
            except WireError as error:
                self._refuse(address, str(error))
                continue
            match message:
                case Done() | Failed() | Settled():
                    if not self._receiver.holds_back(message):
                        self._answered(message)
                case Want():
                    self._receiver.wanted(address, message)
                case Chunk():
                    if not self._receiver.chunk(message):
                        self._refuse(address, f"chunk {message.number} of pull {message.pull_id} can't be")
                case _:
                    self._refuse(address, f"a {type(message).__name__} is not for a decode rank")

    def _refuse(self, address: str, words: str) -> None:
        self._counters.add("dropped_messages")
        now = time.monotonic()
        if now - self._last_log > _LOG_EVERY_S:
            self._last_log = now
            logger.warning("dcp: a message from %s was dropped: %s", address, words)

    def _answered(self, message: Answer) -> None:
        """An answer that ends a pull, once nothing of it is left to do here."""
        match message:
            case Done():
                self._act(self._requests.done(message, time.monotonic()))
            case Failed():
                self._act(self._requests.failed(message, time.monotonic()))
            case Settled():
                self._act(self._requests.settled(message, time.monotonic()))

    def _observe(self, address: str) -> None:
        """Follow the connection's state."""
        line = self._lines.get(address)
        if line is None:
            return
        if line.observe():
            self._lose(address, f"the connection to {address} broke or can't be made")

    def _lose(self, address: str, detail: str) -> None:
        self._book.forget(address)
        self._act(self._requests.peer_lost(address, detail, time.monotonic()))

    def _hang_up(self, address: str) -> None:
        # Pulls that were sent since the line broke are lost with it.
        self._lose(address, f"the connection to {address} stayed broken")
        line = self._lines.pop(address)
        self._loop.unwatch(line.socket)
        self._loop.unwatch(line.monitor)
        line.close()

    def _finish(self, finished: Finished) -> None:
        load = finished.load
        if finished.reason is None:
            self._counters.add("bytes_received", self._rows(load) * self._bytes_per_row)
        elif not finished.aborted:
            self._failures.add(finished.reason, finished.detail)
            logger.warning(
                "dcp: no KV for request %s (transfer %s): %s: %s",
                load.request_id,
                load.transfer_id,
                finished.reason,
                finished.detail,
            )
        if not finished.confirmed:
            logger.warning(
                "dcp: transfer %s may still be written to: its blocks stay out of use until prefill says that it has "
                "stopped, or has ended, or %.0f s after the deadline",
                load.transfer_id,
                _LONGEST_WRITE_S,
            )
        self._receiver.when_quiet(load.request_id, partial(self._over, finished, clear=finished.confirmed))

    def _clear(self, cleared: Cleared) -> None:
        if not cleared.confirmed:
            logger.error(
                "dcp: no word from the writers of transfer %s since it failed: its blocks are used again, because none "
                "of them can write any more unless it was frozen all the time",
                cleared.load.transfer_id,
            )
        self._receiver.when_quiet(cleared.load.request_id, partial(self._over, cleared, clear=True))

    def _over(self, what: Finished | Cleared, *, clear: bool) -> None:
        """Tell the engine, now that no thread of this rank writes into the load's blocks."""
        if clear:
            self._receiver.forget(what.load.request_id)
        self._finished.append(what)

    def _rows(self, load: Load) -> int:
        count: Callable[[int, int], int] = self._layout.local_token_count
        return count(load.end, self._shard) - count(load.start, self._shard)

    def _new_id(self) -> str:
        return f"{self._identity.hex()}-{next(self._numbers)}"
