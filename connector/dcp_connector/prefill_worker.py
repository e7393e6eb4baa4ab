"""The prefill half of a worker: one thread that listens to decode ranks and drives `PrefillRequests`."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import zmq

from dcp_connector.admit import admit
from dcp_connector.errors import Reason, StartupError, WireError
from dcp_connector.loop import Loop
from dcp_connector.requests_prefill import Action, Halt, Hold, PrefillRequests, Reply, Sent, Write, Written
from dcp_connector.sender import Sender
from dcp_connector.sockets import open_listener
from dcp_connector.wire import Cancel, Channel, Chunk, Failed, Grant, Pull, Release, Taken, Want

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_connector.config import ConnectorConfig
    from dcp_connector.geometry import SideLayout
    from dcp_connector.stats import Counters
    from dcp_connector.tensors import Fence, LayerTensor
    from dcp_connector.transfer import Transport
    from dcp_connector.wire import Secret

logger = logging.getLogger(__name__)

#: Messages that are taken in one go; timers and finished writes come in between, whatever peers send.
_PORTION = 64
#: How often refused messages of one kind are logged.
_LOG_EVERY_S = 10.0


class PrefillWorker:
    """Serves the decode ranks that ask this rank for KV.

    `rank` counts over pipeline and tensor ranks (pp * T + tp), as in `Pull.prefill_rank`; `staging_bytes` bounds its
    staging memory. Raises StartupError.
    """

    def __init__(
        self,
        *,
        host: str,
        engine_id: str,
        tp_rank: int,
        pp_rank: int,
        side: SideLayout,
        layers: tuple[LayerTensor, ...],
        whole_pages: bool,
        transport: Transport,
        config: ConnectorConfig,
        staging_bytes: int,
        secret: Secret,
        counters: Counters,
    ) -> None:
        self._side = side
        self._tp_rank = tp_rank
        self._counters = counters
        rank = pp_rank * side.tensor_parallel_size + tp_rank
        self._requests = PrefillRequests(engine_id, rank, config.lease_s, partial(admit, side=side, tp_rank=tp_rank))
        self._channel = Channel(secret, time.time, partial(os.urandom, 16))
        self._sent: deque[Sent] = deque()
        self._fences: dict[str, Fence | None] = {}
        self._last_log = float("-inf")
        self._sender = Sender(
            transport,
            layers,
            side,
            tp_rank,
            config,
            staging_bytes,
            counters,
            self._written,
            self._tell,
            whole_pages=whole_pages,
        )
        try:
            self._socket, self.address = open_listener(host)
        except zmq.ZMQError as error:
            raise StartupError(
                f"the connector can't listen for decode engines on {host}: {error}; "
                "set VLLM_HOST_IP to this pod's own address"
            ) from error
        self._loop = Loop("dcp-prefill", self._next_timer, self._tick)
        self._loop.watch(self._socket, self._receive)
        self._loop.start()

    def hold(self, holds: Sequence[Hold], fence: Fence | None) -> None:
        """Prompts are computed and their blocks kept. Engine thread."""
        for hold in holds:
            self._loop.call(partial(self._hold, hold, fence))

    def drop(self, drops: Sequence[tuple[str, Reason]]) -> None:
        """Transfers whose prompt will never be computed. Engine thread."""
        for transfer_id, reason in drops:
            self._loop.call(partial(self._drop, transfer_id, reason))

    def take_sent(self) -> list[Sent]:
        """Return requests whose blocks are no longer needed, each once. Engine thread, never waits."""
        taken: list[Sent] = []
        while self._sent:
            taken.append(self._sent.popleft())
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
        """Stop answering. Batches in flight are waited for."""
        self._sender.close()
        self._loop.close()
        self._socket.close()

    # Everything below runs on the loop's thread, except `_written` and `_tell`.

    def _hold(self, hold: Hold, fence: Fence | None) -> None:
        self._fences[hold.request_id] = fence
        self._act(self._requests.hold(hold, time.monotonic()))

    def _drop(self, transfer_id: str, reason: Reason) -> None:
        self._act(self._requests.drop(transfer_id, reason, time.monotonic()))

    def _next_timer(self) -> float | None:
        timers = self._requests.next_timer(), self._sender.next_timer()
        return min((timer for timer in timers if timer is not None), default=None)

    def _tick(self, now: float) -> None:
        self._act(self._requests.tick(now))
        self._sender.tick(now)

    def _written(self, transfer_id: str, pull_id: str, result: Written) -> None:
        self._loop.call(lambda: self._act(self._requests.written(transfer_id, pull_id, result, time.monotonic())))

    def _tell(self, peer: bytes, message: Want | Chunk) -> None:
        self._loop.call(lambda: self._act([Reply(peer, message)]))

    def _receive(self) -> None:
        """Take a portion of what is there; whatever a message holds, the next one is taken too."""
        for _ in range(_PORTION):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 2:
                self._refuse(f"{len(parts)} message parts, expected 2")
                continue
            try:
                message = self._channel.open(parts[1])
            except WireError as error:
                self._refuse(str(error))
                continue
            now = time.monotonic()
            if isinstance(message, Pull):
                self._act(self._requests.pull(parts[0], message, now))
            elif isinstance(message, Cancel):
                self._act(self._requests.cancel(parts[0], message, now))
            elif isinstance(message, Release):
                self._act(self._requests.release(message, now))
            elif isinstance(message, Grant):
                self._sender.granted(message)
            elif isinstance(message, Taken):
                self._sender.taken(message)
            else:
                self._refuse(f"a {type(message).__name__} is not for a prefill rank")

    def _refuse(self, words: str) -> None:
        self._counters.add("dropped_messages")
        now = time.monotonic()
        if now - self._last_log > _LOG_EVERY_S:
            self._last_log = now
            logger.warning("dcp: a message on the control port was dropped: %s", words)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply():
                    if isinstance(action.message, Failed):
                        self._counters.add("failed_pulls", 1, action.message.reason)
                    self._socket.send_multipart([action.peer, self._channel.seal(action.message)], zmq.NOBLOCK)
                case Write():
                    self._sender.submit(action, self._fences.get(action.hold.request_id))
                case Halt():
                    self._sender.halt(action.pull_id)
                case Sent():
                    self._sent.append(action)
                    self._fences.pop(action.request_id, None)
