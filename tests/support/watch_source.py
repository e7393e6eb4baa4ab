"""What watches are tested with: an API server whose lists and watches the test decides, and who listens."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from dcp_operator.client import ApiError

Body = dict[str, Any]


class Server:
    """A source whose lists and watches the test decides. A watch of which nothing is told for a moment ends."""

    def __init__(self) -> None:
        self.served = True
        self.items: list[Body] = []
        #: What watches tell, or end with.
        self.changes: queue.Queue[tuple[str, Body] | Exception] = queue.Queue()
        #: The version from which each watch was asked for.
        self.asked_from: list[str] = []
        self.num_lists = 0
        #: What a list ends with: in all places, and in which it is refused.
        self.refusal: ApiError | Exception | None = None
        self.closed: set[str | None] = set()
        #: What kills the thread of a watch.
        self.fatal: BaseException | None = None

    def serves(self, _kind: Any) -> bool:
        return self.served

    def list(self, _kind: Any, namespace: str | None, _label: str = "") -> tuple[list[Body], str]:
        self.num_lists += 1
        if namespace in self.closed:
            raise ApiError(403, "Forbidden", f"leaderworkersets is forbidden in {namespace}")
        if self.refusal is not None:
            raise self.refusal
        return list(self.items), "10"

    def watch(self, _kind: Any, _namespace: Any, _label: str, version: str) -> Iterator[tuple[str, Body]]:
        self.asked_from.append(version)
        if self.fatal is not None:
            raise self.fatal
        while True:
            try:
                change = self.changes.get(timeout=0.05)
            except queue.Empty:
                return
            if isinstance(change, Exception):
                raise change
            yield change


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self.events: list[tuple[str | None, str]] = []
        #: Names of lists and events in their order.
        self.all: list[str] = []
        self.why: list[str | None] = []
        self.places: dict[str | None, str | None] = {}
        #: Names of which it can't take in an event.
        self.indigestible: set[str] = set()

    def take_list(self, _kind: Any, items: Any, version: str, namespace: str | None) -> None:
        self.lists.append([item["metadata"]["name"] for item in items])
        self.all.append("list")

    def on_event(self, _kind: Any, event_type: str | None, body: Body) -> None:
        name = body["metadata"].get("name", "")
        if name in self.indigestible:
            raise ValueError(f"a defect at {name}")
        self.events.append((event_type, name))
        self.all.append(name)

    def say_unavailable(self, _kind: Any, namespace: str | None, why: str | None) -> None:
        self.why.append(why)
        self.places[namespace] = why


def named(name: str, version: str) -> Body:
    return {"metadata": {"name": name, "resourceVersion": version}}


def bookmark(version: str) -> tuple[str, Body]:
    return "BOOKMARK", {"metadata": {"resourceVersion": version}}


def watch_threads() -> list[str]:
    """Return the names of the threads that watch something."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("watch ")]


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
