"""What follows one kind in one namespace: a list, and from its version on a watch in a thread of its own.

A thread waits for the API server, takes its lines apart and keeps of an object what is wanted of it; the event loop
gets no more than the news. kopf does the same for the object itself, and a good deal more that nobody needs for
thousands of pods (docs/adr/0019-watches.md).
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, Protocol

from dcp_operator.client import BOOKMARK, ApiError
from dcp_operator.kinds import Kind
from dcp_operator.metrics import WATCH_RESTARTS
from dcp_operator.names import LABEL_NAME
from dcp_operator.observed import Body

log = logging.getLogger(__name__)

#: From the beginning of a watch to that of the next one at least: an API server may end watches at once. In seconds.
AGAIN_S: Final = 0.5
#: Pauses before a watch that failed is begun again with a list: the first, and the longest of failures in a row. In
#: seconds.
RETRY_S: Final = 2.0
RETRY_MAX_S: Final = 60.0


class Source(Protocol):
    """What of the API server's calls is needed; `dcp_operator.client.Api` has them. Calls block."""

    def list(self, kind: Kind, namespace: str | None, label_selector: str = "") -> tuple[list[Body], str]:
        """Return all objects and the version of the list."""
        ...

    def watch(self, kind: Kind, namespace: str | None, label_selector: str, version: str) -> Iterator[tuple[str, Body]]:
        """Yield changes after a version: what happened, and the object."""
        ...


class Sink(Protocol):
    """Where news goes, on the event loop."""

    def take_list(self, kind: Kind, items: Iterable[Body], version: str, namespace: str | None) -> None:
        """Take in a list."""
        ...

    def on_event(self, kind: Kind, event_type: str | None, body: Body) -> None:
        """Take in a change."""
        ...


class Watch:
    """Follows one kind in one namespace (None: in all) from a version on, until it is ended. Begun on the event loop.

    It ends by itself where the API server knows the kind no longer, or refuses it; whoever wants it then begins anew.
    """

    def __init__(self, source: Source, sink: Sink, kind: Kind, namespace: str | None, version: str) -> None:
        self._source = source
        self._sink = sink
        self._kind = kind
        self._namespace = namespace
        self._version = version
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        #: What the loop has not been told yet, and whether it has been asked to come for it.
        self._news: deque[Callable[[], None]] = deque()
        self._is_called = False
        #: Why it fails, as it was said last since it worked; and the last defect that was said.
        self._failure = ""
        self._defect = ""
        #: How long is waited after the next failure.
        self._pause_s = RETRY_S
        self._thread = threading.Thread(
            target=self._follow,
            name=f"watch {kind.plural}",
            # It waits for news of the API server, which may be minutes away when the process ends.
            daemon=True,
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended or was told to."""
        return self._stop.is_set()

    @property
    def has_died(self) -> bool:
        """Whether its thread has ended though nothing was to end it."""
        return not self._stop.is_set() and not self._thread.is_alive()

    def end(self) -> None:
        """Stop following; what is on its way is ignored."""
        self._stop.set()

    def _follow(self) -> None:
        """List and watch in turns, in the thread."""
        is_cut = False
        while not self._stop.is_set() and not self._loop.is_closed():
            began = time.monotonic()
            try:
                if is_cut:
                    self._list()
                    is_cut = False
                self._watch()
                self._take_in_life()
            except ApiError as error:
                if is_cut and error.status in (403, 404):
                    log.info("watch is given up kind=%s where=%s error=%s", self._kind.plural, self._namespace, error)
                    self._stop.set()
                    return
                self._say(error)
                is_cut = True
            except Exception as error:
                self._say_defect(error)
                is_cut = True
            if is_cut:
                self._stop.wait(self._pause_s * random.uniform(0.8, 1.2))  # noqa: S311 - spreads retries
                self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)
            else:
                # One that lasted goes on at once.
                self._stop.wait(max(0.0, began + AGAIN_S - time.monotonic()))

    def _list(self) -> None:
        """Read everything anew: what happened while the watch was cut is in no event. Raises ApiError."""
        items, self._version = self._source.list(self._kind, self._namespace, LABEL_NAME)
        WATCH_RESTARTS.labels(self._kind.plural).inc()
        self._tell(partial(self._sink.take_list, self._kind, items, self._version, self._namespace))

    def _watch(self) -> None:
        """Tell what happens until the API server ends the watch. Raises ApiError."""
        for what, body in self._source.watch(self._kind, self._namespace, LABEL_NAME, self._version):
            if self._stop.is_set():
                return
            version = body["metadata"]["resourceVersion"]
            # A bookmark is about no object: it only says how far the watch has come.
            if what != BOOKMARK:
                self._tell(partial(self._sink.on_event, self._kind, what, body))
            self._version = version
            self._take_in_life()

    def _take_in_life(self) -> None:
        """Take in that the watch works: what fails next is a failure of its own."""
        self._failure, self._pause_s = "", RETRY_S

    def _tell(self, news: Callable[[], None]) -> None:
        """Have the loop take in news. What comes while it is busy is taken in together."""
        self._news.append(news)
        if self._is_called:
            return
        self._is_called = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop has ended, and with it everybody who could want to know.
            self._stop.set()

    def _deliver(self) -> None:
        # Before anything is taken out: what is put in from now on calls again, or is seen here.
        self._is_called = False
        while self._news:
            news = self._news.popleft()
            # Asked on the loop, where `end` is called: what came before an end is not told after it.
            if self._stop.is_set():
                continue
            try:
                news()
            except Exception:
                # The rest of the news is as good as it was. The next comparison with a list finds what this one hid.
                log.exception("news not taken in kind=%s where=%s", self._kind.plural, self._namespace)

    def _say(self, error: ApiError) -> None:
        """Log why it does not work, once for as long as that is the same."""
        if error.reason != self._failure:
            log.warning(
                "watch ended kind=%s where=%s error=%s: it is begun anew with a list",
                self._kind.plural,
                self._namespace,
                error,
            )
        self._failure = error.reason

    def _say_defect(self, error: Exception) -> None:
        """Log what no answer of an API server should lead to, once for as long as it is the same."""
        failure = repr(error)
        if failure != self._defect:
            log.error(
                "watch failed kind=%s where=%s error=%s next_s=%g: all is listed again until it works",
                self._kind.plural,
                self._namespace,
                failure,
                self._pause_s,
                exc_info=error,
            )
        self._defect = failure


class Watches:
    """Watches by kind and namespace. Used on the event loop, except where it says otherwise."""

    def __init__(self, source: Source, sink: Sink) -> None:
        self._source = source
        self._sink = sink
        self._watches: dict[tuple[Kind, str | None], Watch] = {}

    def follows(self, kind: Kind, namespace: str | None) -> bool:
        """Whether a kind is followed; a watch that has died is given up."""
        watch = self._watches.get((kind, namespace))
        if watch is None or watch.is_over:
            return False
        if watch.has_died:
            log.error("watch has died and is begun anew kind=%s where=%s", kind.plural, namespace)
            watch.end()
            return False
        return True

    def begin(self, kind: Kind, namespace: str | None, version: str) -> None:
        """Follow a kind from the version of a list on; a watch of it that is there already is ended."""
        before = self._watches.get((kind, namespace))
        if before is not None:
            before.end()
        self._watches[kind, namespace] = Watch(self._source, self._sink, kind, namespace, version)

    def end(self) -> None:
        """Stop following everything."""
        for watch in self._watches.values():
            watch.end()
        self._watches.clear()

    def problems(self) -> list[str]:
        """Return which watches have died. Safe from every thread."""
        return [
            f"the watch of {kind.plural} in {namespace or 'all namespaces'} has died"
            for (kind, namespace), watch in list(self._watches.items())
            if watch.has_died
        ]
