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
from dcp_connector.loop import Loop
from dcp_connector.peers import Peer, PeerBook, plan_asks, releases_to_all_ranks, releases_to_idle_ranks
from dcp_connector.requests_decode import Abandon, Action, DecodeRequests, Finished, Load, Resolve, Send, with_budget
from dcp_connector.sockets import Line
from dcp_connector.units import LayoutError
from dcp_connector.wire import Channel, Done, Failed, Message, Settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcp_connector.config import ConnectorConfig
    from dcp_connector.geometry import SideLayout
    from dcp_connector.handshake import RankFacts
    from dcp_connector.stats import Counters

logger = logging.getLogger(__name__)

#: Threads that ask bootstrap servers. A dead address holds one for a few seconds.
_RESOLVERS = 8


class DecodeWorker:
    """Loads KV into this rank's pages."""

    def __init__(
        self,
        *,
        facts: RankFacts,
        layout: SideLayout,
        segment: str,
        config: ConnectorConfig,
        secret: bytes,
        counters: Counters,
    ) -> None:
        self._facts = facts
        self._layout = layout
        self._segment = segment
        self._counters = counters
        self._grace_s = config.cancel_grace_s
        self._timeout_s = config.request_timeout_s
        self._requests = DecodeRequests(config.request_timeout_s, config.cancel_grace_s)
        self._book = PeerBook(facts, layout, secret)
        self._channel = Channel(secret, time.time, partial(os.urandom, 16))
        self._finished: deque[Finished] = deque()
        self._lines: dict[str, Line] = {}
        self._identity = uuid.uuid4().bytes
        self._numbers = itertools.count()
        self._shard = layout.shard_of_rank(facts.tp_rank)
        self._bytes_per_row = layout.heads_per_rank * sum(page.entry_bytes for page in facts.pages.values())
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="dcp-resolve")
        self._loop = Loop("dcp-decode", self._next_timer, self._tick)
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
        if self._facts.tp_rank == 0:
            for transfer_id, origin, engine_id in releases:
                self._resolvers.submit(self._release, transfer_id, origin, engine_id, "decode needs nothing")

    def take_finished(self) -> list[Finished]:
        """Return loads that are over, each once. Engine thread, never waits."""
        taken: list[Finished] = []
        while self._finished:
            taken.append(self._finished.popleft())
        return taken

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._loop.alive

    def close(self) -> None:
        """Stop loading."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        self._loop.close()
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
                case Abandon():
                    if self._facts.tp_rank == 0:
                        load = action.load
                        self._resolvers.submit(
                            self._release, load.transfer_id, load.bootstrap_addr, load.engine_id, "decode gave up"
                        )
                case Finished():
                    self._finish(action)

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
        self._loop.call(lambda: self._act(self._requests.unresolved(load.request_id, refusal)))

    def _resolved(self, load: Load, peer: Peer) -> None:
        try:
            asks = plan_asks(peer, load, self._facts, self._layout, self._segment, self._new_id)
        except LayoutError as error:
            refusal = PeerError(Reason.INCOMPATIBLE, str(error))
            self._act(self._requests.unresolved(load.request_id, refusal))
            return
        if self._rows(load) == 0:
            # Nothing will be written here, but prefill waits for every rank that it serves: ask, and don't wait.
            for ask in asks:
                self._send(ask.address, with_budget(ask.pull, self._timeout_s))
            asks = ()
        self._act(self._requests.resolved(load.request_id, asks, time.monotonic()))
        if self._facts.tp_rank == 0:
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
        line = self._lines.get(address)
        while line is not None:
            try:
                frame = line.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._channel.open(frame)
            except WireError as error:
                self._counters.add("dropped_messages")
                logger.warning("dcp: a message from %s was dropped: %s", address, error)
                continue
            match message:
                case Done():
                    self._act(self._requests.done(message))
                case Failed():
                    self._act(self._requests.failed(message, time.monotonic()))
                case Settled():
                    self._act(self._requests.settled(message))
                case _:
                    self._counters.add("dropped_messages")

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
            logger.warning(
                "dcp: no KV for request %s (transfer %s): %s: %s",
                load.request_id,
                load.transfer_id,
                finished.reason,
                finished.detail,
            )
        if not finished.confirmed:
            logger.error(
                "dcp: prefill did not confirm within %.1f s that transfer %s stopped", self._grace_s, load.transfer_id
            )
        self._finished.append(finished)

    def _rows(self, load: Load) -> int:
        count: Callable[[int, int], int] = self._layout.local_token_count
        return count(load.end, self._shard) - count(load.start, self._shard)

    def _new_id(self) -> str:
        return f"{self._identity.hex()}-{next(self._numbers)}"
