"""Clients of the soak: what each asks, what becomes of it, and what may be excused by an engine that was away."""

from __future__ import annotations

import json
import math
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from devcluster.completions import CompletionError
from tests.support.pd_pair import PDPair

MAX_TOKENS = 4
#: A client that hangs up does so within this.
LONGEST_VISIT_S = 0.3
#: A client that found nobody waits for so long before the next one comes.
_PAUSE_S = 0.5
_STATUS = re.compile(r" answered (\d{3}): ")

RIGHT, WRONG, FAILED, AWAY = "right", "WRONG", "FAILED", "engine away"
LEFT_PREFILL, LEFT_DECODE = "client left prefill", "client left decode"


class Restarts:
    """When an engine was away: from just before it was killed until the one in its place answered. Monotonic seconds.

    One window at a time is open.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: list[tuple[float, float]] = []

    @contextmanager
    def window(self) -> Iterator[None]:
        """An engine is away for the length of this block."""
        began = self._clock()
        self._windows.append((began, math.inf))
        yield
        self._windows[-1] = (began, self._clock())

    def overlap(self, began: float, ended: float, after_s: float = 0.0) -> bool:
        """Tell whether an engine was away in this time, or had come back less than `after_s` before."""
        return any(began <= back + after_s and gone <= ended for gone, back in self._windows)


def is_absence(error: BaseException) -> bool:
    """Tell whether a request met nobody, or somebody who was ending: no answer, or a status of 500 and more."""
    if not isinstance(error, CompletionError | OSError):
        return False
    status = _STATUS.search(str(error))
    return status is None or int(status[1]) >= 500


@dataclass
class Record:
    """What became of the requests. `words` says so of each that nothing excuses."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    words: list[str] = field(default_factory=list[str])
    #: The slowest of all, and of those in whose time no engine was away or had just come back, whatever became of them.
    slowest_s: float = 0.0
    slowest_undisturbed_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, took_s: float, *, undisturbed: bool, words: str = "") -> None:
        """Take in one request."""
        with self.lock:
            self.outcomes[outcome] += 1
            self.slowest_s = max(self.slowest_s, took_s)
            if undisturbed:
                self.slowest_undisturbed_s = max(self.slowest_undisturbed_s, took_s)
            if words:
                self.words.append(words)


class Traffic:
    """Clients of a pair of engines. `settle_s`: an engine that is back may have left others waiting for so long."""

    def __init__(
        self,
        pair: Callable[[], PDPair],
        restarts: Restarts,
        expected: Mapping[str, tuple[int, ...]],
        seed: int,
        settle_s: float,
    ) -> None:
        self.record = Record()
        self._pair = pair
        self._restarts = restarts
        self._expected = expected
        self._prompts = list(expected)
        self._seed = seed
        self._settle_s = settle_s

    def one(self, number: int) -> None:
        """Send request `number` by a flow and with a fate that its number decides."""
        rng = random.Random(self._seed * 1_000_003 + number)
        prompt, fate = rng.choice(self._prompts), rng.random()
        began = time.monotonic()
        try:
            outcome, words = self._send(self._pair(), rng, prompt, fate, f"{self._seed}-{number}")
        except Exception as error:
            # Whatever it is, it is what became of the request.
            excused = is_absence(error) and self._restarts.overlap(began, time.monotonic())
            outcome = AWAY if excused else FAILED
            words = "" if excused else f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        self.record.add(
            outcome,
            ended - began,
            undisturbed=not self._restarts.overlap(began, ended, self._settle_s),
            words=f"request {number}, after {ended - began:.1f} s: {words}" if words else "",
        )
        if outcome == AWAY:
            time.sleep(_PAUSE_S)

    def _send(self, pair: PDPair, rng: random.Random, prompt: str, fate: float, name: str) -> tuple[str, str]:
        """Return what became of the request, and words if it was answered wrongly."""
        if fate < 0.05:
            _hang_up(pair.decode.url, prompt, pair.to_decode(f"left-{name}"), rng.random() * LONGEST_VISIT_S)
            return LEFT_DECODE, ""
        if fate < 0.10:
            params = {"do_remote_decode": True, "do_remote_prefill": False}
            _hang_up(pair.prefill.url, prompt, params, rng.random() * LONGEST_VISIT_S)
            return LEFT_PREFILL, ""
        if rng.random() < 0.5:
            answer, failure = pair.serially(prompt, max_tokens=MAX_TOKENS), None
        else:
            # What decode answers counts also when prefill fails.
            answer, failure = pair.both(prompt, MAX_TOKENS)
        expected = self._expected[prompt]
        if answer.token_ids != expected:
            return WRONG, f"{prompt!r} was answered with {answer.token_ids} instead of {expected}"
        if failure is not None:
            raise failure
        return RIGHT, ""


def _hang_up(url: str, prompt: str, kv_transfer_params: Mapping[str, object], after_s: float) -> None:
    """Ask for many tokens and leave without waiting for them."""
    host, port = url.removeprefix("http://").split(":")
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 64, "kv_transfer_params": kv_transfer_params}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), 10) as sock:
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(after_s)
