"""Whether all ranks of an engine live, asked from its scheduler process, with or without traffic.

Ranks are other processes, on other nodes where an engine spans some. Each serves `GET /healthz` on a port of its own,
from a thread that depends on nothing that it reports on: 200, or 503 with one line for each thing that is wrong. The
bootstrap server asks all of them when it is asked itself. So an idle engine is as well as a busy one, a rank that was
killed refuses the connection, and one that is frozen lets it time out. `GET /v1/failures` beside it says why transfers
failed on the rank (`failures`).
"""

import http.client
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from dcp_connector.errors import StartupError
from dcp_connector.failures import MAX_BYTES, Entry, decode, merged
from dcp_connector.httpd import Answer, HttpServer, get, json_text, text

#: Time for one rank's answer. Kubernetes' probes of /healthz need a longer timeoutSeconds.
RANK_TIMEOUT_S = 2.0
#: What was found is the answer for so long, whatever the number of those who ask.
LASTS_S = 1.0
#: A thread that hasn't come round for so long is stuck. Its longest sleep is a small part of this.
STUCK_S = 60.0
_MAX_ASKING = 32
_MAX_ANSWER_BYTES = 4096


class RankHealth:
    """Serves one rank's health on a random port of `host`; `problems()` returns what is wrong, one line each.

    `failures()` returns why transfers failed, see `failures.FailureLog`.

    Raises StartupError when `host` isn't this machine's address.
    """

    def __init__(
        self, host: str, problems: Callable[[], list[str]], failures: Callable[[], list[Entry]] = list
    ) -> None:
        self._problems = problems
        self._failures = failures
        try:
            self._server = HttpServer(host, 0, self._respond, "dcp-health")
        except OSError as error:
            raise StartupError(
                f"the connector can't serve this rank's health on {host}: {error}; "
                "set VLLM_HOST_IP to this pod's own address"
            ) from error
        self.address = f"[{host}]:{self._server.port}" if ":" in host else f"{host}:{self._server.port}"

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def _respond(self, path: str) -> Answer:
        if path == "/v1/failures":
            return json_text(200, {"failures": self._failures()})
        if path != "/healthz":
            return text(404, "no such path; there are /healthz and /v1/failures")
        problems = self._problems()
        return text(503, "; ".join(problems)) if problems else text(200, "ok")


def thread_problem(name: str, *, alive: bool, idle_s: float) -> str | None:
    """Return what is wrong with a thread that last came round `idle_s` seconds ago, or None."""
    if not alive:
        return f"the {name} thread has died"
    return f"the {name} thread is stuck for {idle_s:.0f} s" if idle_s > STUCK_S else None


class RankWatch:
    """Asks all ranks of an engine: `addresses` holds each one's "host:port" by a name for people. Thread-safe."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)
        self._lock = threading.Lock()
        self._found: tuple[str, ...] = ()
        self._found_at = float("-inf")
        self._failures_lock = threading.Lock()
        self._failures: list[Entry] = []
        self._failures_at = float("-inf")

    def problems(self) -> tuple[str, ...]:
        """Return one line for each rank that isn't well, in the order of the ranks; empty when all are."""
        with self._lock:
            if time.monotonic() - self._found_at > LASTS_S:
                with ThreadPoolExecutor(max(1, min(_MAX_ASKING, len(self._addresses)))) as pool:
                    answers = list(pool.map(_ask, self._addresses.values()))
                named = zip(self._addresses, answers, strict=True)
                self._found = tuple(f"{name}: {words}" for name, words in named if words is not None)
                self._found_at = time.monotonic()
            return self._found

    def failures(self) -> list[Entry]:
        """Return why transfers failed on any rank, the newest first. Ranks that don't answer are left out."""
        with self._failures_lock:
            if time.monotonic() - self._failures_at > LASTS_S:
                with ThreadPoolExecutor(max(1, min(_MAX_ASKING, len(self._addresses)))) as pool:
                    self._failures = merged(pool.map(_ask_failures, self._addresses.values()))
                self._failures_at = time.monotonic()
            return self._failures


def _ask_failures(address: str) -> list[Entry]:
    """Return why transfers failed on the rank at "host:port"; nothing where it doesn't say."""
    host, _, port = address.rpartition(":")
    try:
        status, _, body = get(host.strip("[]"), int(port), "/v1/failures", RANK_TIMEOUT_S, MAX_BYTES)
    except (OSError, http.client.HTTPException, ValueError):
        return []
    return decode(body) if status == 200 else []


def _ask(address: str) -> str | None:
    """Return what is wrong with the rank at "host:port", or None."""
    host, _, port = address.rpartition(":")
    try:
        status, _, body = get(host.strip("[]"), int(port), "/healthz", RANK_TIMEOUT_S, _MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"doesn't answer at {address}: {error}"
    words = body.decode("utf-8", "replace").strip()
    return None if status == 200 else words
