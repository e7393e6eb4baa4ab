"""A man in the middle of the control channel: it passes messages on, or loses, repeats, delays and reorders them."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import zmq

Socket = zmq.Socket[bytes]

#: Where a frame's payload begins, see `wire`.
PAYLOAD_AT = 60


@dataclass(frozen=True)
class Weather:
    """Chances per message, and the longest delay. A delay that differs between messages reorders them."""

    lose: float = 0.0
    repeat: float = 0.0
    delay_s: float = 0.0


class ControlProxy:
    """Between decode ranks and one prefill rank's control address."""

    def __init__(self, target: str, weather: Weather, seed: int) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._target = target
        self._random = random.Random(seed)
        self._front = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._backs: dict[bytes, Socket] = {}
        #: (when, order, identity, message, whether it goes to prefill)
        self._later: list[tuple[float, int, bytes, bytes, bool]] = []
        self._latest: Counter[tuple[bytes, bool]] = Counter()
        self._to_lose: Counter[str] = Counter()
        self._orders = 0
        self._stop = threading.Event()
        self.weather = weather
        #: messages by their kind (`wire`), as prefill and decode sent them
        self.taken: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        #: copies of a message after the first, and messages that came behind one that was sent after them
        self.repeated = self.reordered = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def lose(self, kind: str, count: int) -> None:
        """Lose so many messages of a kind from now on."""
        self._to_lose[kind] = count

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop.is_set():
            for sock, _ in poller.poll(10):
                if sock is self._front:
                    identity, message = self._front.recv_multipart()
                    if identity not in self._backs:
                        back = self._backs[identity] = self._context.socket(zmq.DEALER)
                        # Not the decode rank's own: it may have a line to the same prefill rank past this proxy.
                        back.setsockopt(zmq.IDENTITY, identity[::-1] + b"proxy")
                        back.connect(self._target)
                        poller.register(back, zmq.POLLIN)
                    self._take(identity, message, True)
                else:
                    identity = next(key for key, back in self._backs.items() if back is sock)
                    self._take(identity, self._backs[identity].recv(), False)
            while self._later and self._later[0][0] <= time.monotonic():
                _, order, identity, message, to_prefill = heapq.heappop(self._later)
                self._pass(order, identity, message, to_prefill)

    def _take(self, identity: bytes, message: bytes, to_prefill: bool) -> None:
        weather, now = self.weather, time.monotonic()
        kind = msgspec.msgpack.decode(message[PAYLOAD_AT:])["k"]
        self.taken[kind] += 1
        if self._to_lose[kind] or self._random.random() < weather.lose:
            self._to_lose[kind] = max(0, self._to_lose[kind] - 1)
            self.lost[kind] += 1
            return
        copies = 2 if self._random.random() < weather.repeat else 1
        self.repeated += copies - 1
        for _ in range(copies):
            when = now + self._random.random() * weather.delay_s
            heapq.heappush(self._later, (when, self._orders, identity, message, to_prefill))
            self._orders += 1

    def _pass(self, order: int, identity: bytes, message: bytes, to_prefill: bool) -> None:
        self.reordered += order < self._latest[identity, to_prefill]
        self._latest[identity, to_prefill] = max(order, self._latest[identity, to_prefill])
        try:
            if to_prefill:
                self._backs[identity].send(message, zmq.NOBLOCK)
            else:
                self._front.send_multipart([identity, message], zmq.NOBLOCK)
        except zmq.Again:
            pass  # nobody is left to take it


@contextmanager
def control_proxy(target: str, weather: Weather, seed: int = 0) -> Iterator[ControlProxy]:
    proxy = ControlProxy(target, weather, seed)
    try:
        yield proxy
    finally:
        proxy.close()
