"""One thread that owns sockets and state: everything that happens to them happens here, one thing at a time.

Other threads hand work in with `call`. So neither the request state machines nor the ZeroMQ sockets, which are not
thread-safe, need a lock, and nothing that a peer sends can stop the thread.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from dcp_connector.sockets import Socket

logger = logging.getLogger(__name__)

#: Longest sleep; only bounds how late a closed loop is noticed.
_MAX_WAIT_S = 5.0


class Loop:
    """Polls sockets, runs posted work, calls `tick(now)` when `next_timer()` says so. Times are `time.monotonic`."""

    def __init__(self, name: str, next_timer: Callable[[], float | None], tick: Callable[[float], None]) -> None:
        self._next_timer = next_timer
        self._tick = tick
        self._poller = zmq.Poller()
        self._handlers: dict[Socket | int, Callable[[], None]] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._poller.register(self._wake_in.fileno(), zmq.POLLIN)
        self._closed = False
        self._turned = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def idle_s(self) -> float:
        """Seconds since the thread last came round; far more than its longest sleep means that something holds it."""
        return time.monotonic() - self._turned

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` on the loop's thread soon. Safe from any thread, never blocks."""
        self._inbox.append(work)
        self._wake()

    def watch(self, sock: Socket, handler: Callable[[], None]) -> None:
        """Call `handler` whenever the socket has something to read. Loop thread only, or before `start`."""
        self._handlers[sock] = handler
        self._poller.register(sock, zmq.POLLIN)

    def unwatch(self, sock: Socket) -> None:
        """Forget a socket. Loop thread only."""
        if self._handlers.pop(sock, None) is not None:
            self._poller.unregister(sock)

    def close(self) -> None:
        """End the thread after the work at hand and wait for it."""
        self._closed = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    def _wake(self) -> None:
        try:
            self._wake_out.send(b"\0")
        except OSError:
            return  # full: it is awake already; closed: it is gone

    def _run(self) -> None:
        while not self._closed:
            self._turned = time.monotonic()
            for sock, _ in self._poller.poll(self._timeout_ms()):
                if sock == self._wake_in.fileno():
                    self._drain()
                else:
                    handler = self._handlers.get(sock)
                    if handler is not None:
                        _guarded(handler)
            while self._inbox:
                _guarded(self._inbox.popleft())
            timer = self._next_timer()
            now = time.monotonic()
            if timer is not None and timer <= now:
                _guarded(lambda now=now: self._tick(now))
        self._wake_in.close()
        self._wake_out.close()

    def _timeout_ms(self) -> int:
        if self._inbox:
            return 0
        timer = self._next_timer()
        wait = _MAX_WAIT_S if timer is None else min(_MAX_WAIT_S, max(0.0, timer - time.monotonic()))
        return int(wait * 1000) + 1

    def _drain(self) -> None:
        try:
            while self._wake_in.recv(4096):
                pass
        except BlockingIOError:
            return


def _guarded(work: Callable[[], None]) -> None:
    """Run one piece of work; log what escapes it, because the thread has to go on for all other requests."""
    try:
        work()
    except Exception:
        logger.exception("dcp: unexpected error in a connector thread; please report it")
