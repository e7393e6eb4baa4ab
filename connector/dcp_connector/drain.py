"""What an engine's pod does before it is stopped: waits until no request runs and no KV is held for another engine.

    python3 -m dcp_connector.drain --port=8000 --requests=60 --kv=120

A container's preStop hook runs it, so it holds for every way in which a pod goes: a rollout, a scale-down, a node that
is drained, a deletion by hand, with or without an operator. It asks the engine's own /metrics, says what it waits for
in the container's log, and always ends with status 0: whatever it found, the engine is stopped next.

With t seconds since the start, r requests running or waiting, and k finished requests whose KV is held, the engine may
stop as soon as

    t >= settle   and   (r = 0  or  t >= max(settle, requests))   and   k = 0

held at two looks in a row, and at the latest at t = max(settle, requests) + kv. Nothing here but the standard library:
the hook has to start at once, in an image that it knows nothing of.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import math
import os
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: vLLM's gauges of its requests, and the connector's of what it holds: each once per engine of the process.
REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
HELD = ("vllm:dcp_kv_pinned_requests",)

#: Pause between two looks, in seconds.
INTERVAL_S = 1.0
#: Longest wait for an answer, in seconds: an engine that tokenizes a long prompt is slow to answer.
ANSWER_TIMEOUT_S = 5.0
#: How many looks in a row have to say the same: a request can be between the server and the scheduler at one of them.
LOOKS = 2
#: An engine that gives no answer for so long is stuck: there is nothing to wait for.
SILENCE_S = 30.0
_THIS_POD = "127.0.0.1"
#: Output of the container's first process, which is the container's log; a hook's own output goes nowhere.
CONTAINER_LOG = "/proc/1/fd/1"


class End(Enum):
    """Why the wait is over; the value is how it is said."""

    IDLE = "no request runs and no KV is held"
    CUT = "requests still run after their time, and no KV is held"
    DEADLINE = "the time is over"
    ABSENT = "nothing listens on the engine's port, so there is nothing to wait for"
    SILENT = "the engine gives no answer any more"


class Failure(Enum):
    """A look that saw nothing."""

    REFUSED = "refused"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait, in seconds from the start.

    `settle_s`: at least so long, until routers and endpoints know that the pod goes. `requests_s`: for requests that
    run. `kv_s`: beyond that, for KV that another engine has yet to fetch.
    """

    settle_s: float
    requests_s: float
    kv_s: float

    @property
    def cut_s(self) -> float:
        """When running requests are waited for no longer."""
        return max(self.settle_s, self.requests_s)

    @property
    def deadline_s(self) -> float:
        """When nothing is waited for any longer."""
        return self.cut_s + self.kv_s


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine says of itself: numbers of requests, None where it doesn't say."""

    requests: float | None
    held: float | None


@dataclass(frozen=True, slots=True)
class Seen:
    """The same at how many looks in a row, and since when there was no answer (seconds from the start)."""

    free: int = 0
    refused: int = 0
    silent_since_s: float | None = None


def judge(now_s: float, look: Load | Failure, seen: Seen, limits: Limits) -> tuple[Seen, End | None]:
    """Return what is known after a look at `now_s`, and why the wait is over if it is."""
    end: End | None = None
    if look is Failure.REFUSED:
        seen = Seen(refused=seen.refused + 1)
        end = End.ABSENT if seen.refused >= LOOKS else None
    elif isinstance(look, Failure):
        since_s = now_s if seen.silent_since_s is None else seen.silent_since_s
        seen = Seen(silent_since_s=since_s)
        end = End.SILENT if now_s - since_s >= SILENCE_S else None
    else:
        is_free = look.held == 0 and (look.requests == 0 or now_s >= limits.cut_s)
        seen = Seen(free=seen.free + 1 if is_free else 0)
        if seen.free >= LOOKS and now_s >= limits.settle_s:
            end = End.IDLE if look.requests == 0 else End.CUT
    if end is None and now_s >= limits.deadline_s:
        end = End.DEADLINE
    return seen, end


def read(text: str) -> Load:
    """Return the load that a page of metrics tells."""
    return Load(_total(text, REQUESTS), _total(text, HELD))


def words(look: Load | Failure) -> str:
    """Return what a look saw, for a line of the log."""
    match look:
        case Failure.REFUSED:
            return "nothing listens on the engine's port"
        case Failure.SILENT:
            return "the engine gives no answer"
        case Load(requests, held):
            return f"requests running or waiting: {_number(requests)}, requests whose KV is held: {_number(held)}"


def wait(
    look: Callable[[], Load | Failure],
    limits: Limits,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    say: Callable[[str], None],
) -> End:
    """Look again and again until the engine may be stopped; say what changes, and at the end why it is over."""
    start, seen, said, end = clock(), Seen(), "", None
    while end is None:
        found = look()
        now_s = clock() - start
        seen, end = judge(now_s, found, seen, limits)
        line = words(found)
        if line != said:
            said = line
            say(f"waiting before the engine stops: {line} ({now_s:.0f} s of at most {limits.deadline_s:.0f} s)")
        if end is None:
            sleep(max(0.0, min(INTERVAL_S, limits.deadline_s - now_s)))
    last = f"; {said}" if end in (End.CUT, End.DEADLINE) else ""
    say(f"the engine is stopped after {clock() - start:.0f} s: {end.value}{last}")
    return end


def ask(host: str, port: int) -> Load | Failure:
    """Return the load of the engine that listens there."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers={"Connection": "close"})
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        return read(text) if answer.status == http.client.OK else Failure.SILENT
    except ConnectionRefusedError:
        return Failure.REFUSED
    except (OSError, http.client.HTTPException):
        return Failure.SILENT
    finally:
        connection.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Wait as the arguments say; return 0."""
    parser = argparse.ArgumentParser("python3 -m dcp_connector.drain", description="Wait until an engine may stop.")
    parser.add_argument("--port", type=int, required=True, help="port of the engine's HTTP server")
    parser.add_argument("--host-variable", help="environment variable with the engine's host, where it isn't this pod")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds to wait at least; 5 by default")
    parser.add_argument("--requests", type=float, required=True, help="seconds to wait for running requests")
    parser.add_argument("--kv", type=float, required=True, help="seconds to wait beyond that for KV to be fetched")
    parser.add_argument("--log", default=CONTAINER_LOG, help=f"file to write lines to; {CONTAINER_LOG} by default")
    given = parser.parse_args(arguments)
    limits = Limits(settle_s=given.settle, requests_s=given.requests, kv_s=given.kv)
    host = os.environ.get(given.host_variable or "", "") or _THIS_POD
    wait(
        lambda: ask(host, given.port),
        limits,
        clock=time.monotonic,
        sleep=time.sleep,
        say=lambda line: _write(given.log, line),
    )
    return 0


def _write(path: str, line: str) -> None:
    """Write a line to a log, or where that isn't ours to write to this process's own output."""
    text = f"dcp drain: {line}\n"
    try:
        with Path(path).open("a", encoding="utf-8") as log:
            log.write(text)
    except OSError:
        with contextlib.suppress(OSError):
            sys.stdout.write(text)
            sys.stdout.flush()


def _total(text: str, names: Sequence[str]) -> float | None:
    """Return the sum of some gauges over all engines, None where one of them is not on the page."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        # name{label="value",...} number, or name number
        name = line.replace("{", " ", 1).partition(" ")[0]
        if name in names:
            value = _finite(line.rpartition(" ")[2])
            if value is not None:
                totals[name] = totals.get(name, 0.0) + value
    return sum(totals.values()) if len(totals) == len(names) else None


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "not said" if value is None else f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())
