"""What happens in a namespace, by watches: who waits for an object looks again when something of it changed."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tests.support.cluster_watch import ApiServer, Seen
from tests.support.truth import NAME, label

Body = dict[str, Any]


class Mirror:
    """Counts what happens to each object and its children, and how often a condition of an object says another word."""

    def __init__(self) -> None:
        #: By object, what happened to it and to what bears its name.
        self.happened: Counter[str] = Counter()
        #: Changes of a condition's status or reason, of all objects, whoever wrote them.
        self.changed = 0
        self._words: dict[str, dict[str, tuple[str, str]]] = {}
        self._news = threading.Condition()

    def wait(self, name: str, since: int, timeout_s: float) -> None:
        """Wait until more has happened to an object than `since`, or for a time."""
        with self._news:
            self._news.wait_for(lambda: self.happened[name] > since, timeout_s)

    def take(self, seen: Seen, *, is_owner: bool) -> None:
        """Take in one event."""
        metadata = seen.body["metadata"]
        with self._news:
            self.happened[metadata["name"] if is_owner else label(seen.body, NAME)] += 1
            if is_owner:
                said = {
                    entry["type"]: (entry["status"], entry["reason"])
                    for entry in seen.body.get("status", {}).get("conditions", [])
                }
                before = self._words.get(metadata["uid"], {})
                self.changed += sum(before.get(kind) != words for kind, words in said.items())
                self._words[metadata["uid"]] = said
            self._news.notify_all()


@contextmanager
def following(api: ApiServer, owners: str, children: Mapping[str, str]) -> Iterator[Mirror]:
    """Follow the objects at a path, which has none yet, and their children at others."""
    mirror = Mirror()
    with ExitStack() as stack:
        for path in (owners, *children.values()):
            items, version = api.listed(path)
            assert path != owners or not items, "changes of objects that are there already would not be counted"
            stack.enter_context(api.watch(path, partial(mirror.take, is_owner=path == owners), version))
        yield mirror
