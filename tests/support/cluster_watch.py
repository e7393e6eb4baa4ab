"""What happens in the cluster, with the time at which it was seen: watches for benches and for tests of faults."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import urllib3

from devcluster.paths import ClusterPaths
from devcluster.settings import APISERVER

Body = dict[str, Any]
_REQUESTS = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Seen:
    """One event of a watch. `at` is of the monotonic clock, in seconds."""

    at: float
    kind: str
    body: Body = field(repr=False)


class ApiServer:
    """The API server as the cluster's administrator; safe from several threads."""

    def __init__(self, paths: ClusterPaths, connections: int = 16) -> None:
        self._pool = urllib3.HTTPSConnectionPool(
            APISERVER.address,
            APISERVER.number,
            maxsize=connections,
            ca_certs=str(paths.pki / "ca.crt"),
            cert_file=str(paths.pki / "admin.crt"),
            key_file=str(paths.pki / "admin.key"),
        )

    def call(self, method: str, path: str, body: Body | None = None, kind: str = "application/json") -> Body:
        """Send a request; return the JSON of the answer. An answer that is no success is an AssertionError."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": kind, "Accept": "application/json"}
        answer = self._pool.request(method, path, body=data, headers=headers, timeout=60.0)
        assert 200 <= answer.status < 300, f"{method} {path}: {answer.status} {answer.data[:300]!r}"
        return answer.json()

    def text(self, path: str) -> str:
        """Return the text of an answer."""
        return self._pool.request("GET", path, timeout=60.0).data.decode()

    def items(self, path: str) -> list[Body]:
        """Return the items of a list."""
        return self.listed(path)[0]

    def listed(self, path: str) -> tuple[list[Body], str]:
        """Return the items of a list, and its version: a watch from that on misses nothing."""
        found = self.call("GET", path)
        return found["items"], found["metadata"]["resourceVersion"]

    @contextmanager
    def watch(self, path: str, take: Callable[[Seen], None], version: str = "") -> Iterator[None]:
        """Have `take` called in a thread for everything that happens to the objects at a path, until the block ends.

        `version` is that of a list from which on it is told, by default one that is made now.
        """
        version = version or self.listed(f"{path}{'&' if '?' in path else '?'}limit=1")[1]
        query = f"{'&' if '?' in path else '?'}watch=1&resourceVersion={version}&timeoutSeconds=3600"
        answer = self._pool.request(
            "GET", path + query, preload_content=False, timeout=urllib3.Timeout(connect=5, read=None)
        )
        over = threading.Event()

        def read() -> None:
            try:
                for line in _lines(answer):
                    event = json.loads(line)
                    take(Seen(time.monotonic(), event["type"], event["object"]))
            except (urllib3.exceptions.HTTPError, OSError, ValueError):
                # The block has ended, or the API server is gone: the caller sees what was taken.
                if not over.is_set():
                    raise

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            answer.shutdown()
            thread.join(5)
            answer.release_conn()

    def requests(self) -> list[tuple[dict[str, str], int]]:
        """Return how many requests the API server has answered, by their labels."""
        found = _REQUESTS.finditer(self.text("/metrics"))
        return [(dict(_LABEL.findall(one["labels"])), int(float(one["count"]))) for one in found]


def _lines(answer: Any) -> Iterator[bytes]:
    rest = b""
    for chunk in answer.stream(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)
