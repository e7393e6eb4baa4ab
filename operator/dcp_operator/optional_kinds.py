"""Children of kinds that a cluster need not know: found when they come, left when they go, without a restart.

kopf watches what is there when it starts. A kind that is installed later would be missed until the next start, and one
that is not there would fill the log. So these kinds are followed here: the API server is asked for them every so
often, and while it knows one, a list and a watch of it feed the same cache as everything else.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dcp_operator.client import ApiError
from dcp_operator.kinds import LEADER_WORKER_SET, Kind
from dcp_operator.names import LABEL_NAME
from dcp_operator.observed import Body

log = logging.getLogger(__name__)

#: Every so often the API server is asked which of the kinds it knows, in seconds.
ASK_S: Final = 10.0
#: Pause between two watches, in seconds.
AGAIN_S: Final = 0.5
#: Pause before a watch that failed is begun again, in seconds.
RETRY_S: Final = 2.0

#: Kind -> what to do to have it in a cluster.
_CURES: Final = {
    LEADER_WORKER_SET.kind: "spec.prefill.multinode or spec.decode.multinode needs LeaderWorkerSet, which this cluster "
    "doesn't have. Install its release 0.7 or newer (https://lws.sigs.k8s.io), which this object then waits for no "
    "longer, or leave multinode out where an engine fits one node",
}


class Source(Protocol):
    """What of the API server's calls is needed; `dcp_operator.client.Api` has them. Calls block."""

    def serves(self, kind: Kind) -> bool:
        """Whether the API server knows a kind."""
        ...

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

    def say_unavailable(self, kind: Kind, namespace: str | None, why: str | None) -> None:
        """Take in that a kind can't be had in a namespace (None: in any), or (`why` is None) that it can."""
        ...


#: Runs a blocking call elsewhere: `await run(function, *arguments)`.
Run = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Watch:
    """What follows one namespace: a thread, and how it is told to end or tells that the API server ended it."""

    stop: threading.Event
    thread: threading.Thread

    @property
    def has_died(self) -> bool:
        """Whether the thread has ended though nothing was to end it."""
        return not self.stop.is_set() and not self.thread.is_alive()


class OptionalKind:
    """Follows one kind in all namespaces of interest. `run` runs a blocking call elsewhere."""

    def __init__(self, source: Source, sink: Sink, kind: Kind, namespaces: Sequence[str | None], run: Run) -> None:
        self._source = source
        self._sink = sink
        self._kind = kind
        self._namespaces = tuple(namespaces)
        self._run = run
        self._watches: dict[str | None, Watch] = {}

    async def look(self) -> None:
        """Ask whether the kind is there, and begin or end to follow it. Raises ApiError where that can't be learnt.

        A namespace that refuses, or where the list fails, keeps none of the others from being followed.
        """
        if not await self._run(self._source.serves, self._kind):
            self.end()
            for namespace in self._namespaces:
                # With the definition Kubernetes has removed every object of the kind.
                self._sink.take_list(self._kind, (), "", namespace)
                self._sink.say_unavailable(self._kind, namespace, _CURES[self._kind.kind])
            return
        failed: ApiError | None = None
        for namespace in self._namespaces:
            watch = self._watches.get(namespace)
            if watch is not None and watch.has_died:
                log.error("watch has died and is begun anew kind=%s namespace=%s", self._kind.plural, namespace)
                watch.stop.set()
            elif watch is not None and not watch.stop.is_set():
                continue
            try:
                await self._look_in(namespace)
            except ApiError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    async def _look_in(self, namespace: str | None) -> None:
        """Begin to follow one namespace, unless it refuses. Raises ApiError for any other failure."""
        try:
            items, version = await self._run(self._source.list, self._kind, namespace, LABEL_NAME)
        except ApiError as error:
            if error.status != 403:
                raise
            # What is known of it is kept: that it can't be seen doesn't make it go.
            why = f"the operator may not work with {self._kind.plural}: {error}. Upgrade its Helm release"
            self._sink.say_unavailable(self._kind, namespace, why)
            return
        self._sink.take_list(self._kind, items, version, namespace)
        self._begin(namespace, version)
        self._sink.say_unavailable(self._kind, namespace, None)

    async def keep_looking(self) -> None:
        """Look again and again, for ever."""
        while True:
            await asyncio.sleep(ASK_S)
            try:
                await self.look()
            except ApiError as error:
                log.warning("optional kind not learnt kind=%s error=%s", self._kind.plural, error)

    def problems(self) -> list[str]:
        """Return which watches have died. Safe from every thread."""
        return [
            f"the watch of {self._kind.plural} in {namespace or 'all namespaces'} has died"
            for namespace, watch in list(self._watches.items())
            if watch.has_died
        ]

    def end(self) -> None:
        """Stop following; what is on its way is ignored."""
        for watch in self._watches.values():
            watch.stop.set()
        self._watches.clear()

    def _begin(self, namespace: str | None, version: str) -> None:
        stop = threading.Event()
        thread = threading.Thread(
            target=self._follow,
            args=(namespace, version, stop, asyncio.get_running_loop()),
            name=f"watch {self._kind.plural}",
            # It waits for news of the API server, which may be minutes away when the process ends.
            daemon=True,
        )
        thread.start()
        self._watches[namespace] = Watch(stop, thread)

    def _follow(
        self, namespace: str | None, version: str, stop: threading.Event, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Watch one namespace until told to stop, or until the API server knows the kind no longer. In a thread."""
        failure = ""
        while not stop.is_set():
            try:
                for what, body in self._source.watch(self._kind, namespace, LABEL_NAME, version):
                    version = body["metadata"]["resourceVersion"]
                    self._tell(loop, stop, self._sink.on_event, self._kind, what, body)
                # An API server that ends watches at once is not asked for the next one at once.
                stop.wait(AGAIN_S)
                continue
            except ApiError as error:
                log.info("watch ended kind=%s namespace=%s error=%s", self._kind.plural, namespace, error)
            except Exception as error:
                failure = self._defect(namespace, error, failure)
            stop.wait(RETRY_S)
            try:
                items, version = self._source.list(self._kind, namespace, LABEL_NAME)
            except ApiError as error:
                if error.status in (403, 404):
                    stop.set()
            except Exception as error:
                failure = self._defect(namespace, error, failure)
            else:
                self._tell(loop, stop, self._sink.take_list, self._kind, items, version, namespace)

    def _defect(self, namespace: str | None, error: Exception, before: str) -> str:
        """Log what no answer of an API server should lead to, once for as long as it is the same; return what it is."""
        failure = repr(error)
        if failure != before:
            log.error(
                "watch failed kind=%s namespace=%s error=%s retry_s=%g: all is listed again until it works",
                self._kind.plural,
                namespace,
                failure,
                RETRY_S,
                exc_info=error,
            )
        return failure

    @staticmethod
    def _tell(loop: asyncio.AbstractEventLoop, stop: threading.Event, take: Callable[..., None], *news: object) -> None:
        def deliver() -> None:
            # Asked again on the loop, where `end` is called: what came before an end is not told after it.
            if not stop.is_set():
                take(*news)

        try:
            loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            # The loop has ended, and with it everybody who could want to know.
            stop.set()
