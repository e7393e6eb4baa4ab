"""Children of kinds that a cluster need not know: found when they come, left when they go, without a restart.

The API server is asked for them every so often, and while it knows one, a list and a watch of it feed the same cache
as everything else.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from dcp_operator import watches
from dcp_operator.client import ApiError
from dcp_operator.kinds import LEADER_WORKER_SET, Kind
from dcp_operator.names import LABEL_NAME

log = logging.getLogger(__name__)

#: Every so often the API server is asked which of the kinds it knows, in seconds.
ASK_S: Final = 10.0

#: Kind -> what to do to have it in a cluster.
_CURES: Final = {
    LEADER_WORKER_SET.kind: "spec.prefill.multinode or spec.decode.multinode needs LeaderWorkerSet, which this cluster "
    "doesn't have. Install its release 0.7 or newer (https://lws.sigs.k8s.io), which this object then waits for no "
    "longer, or leave multinode out where an engine fits one node",
}


class Source(watches.Source, Protocol):
    """What of the API server's calls is needed; `dcp_operator.client.Api` has them. Calls block."""

    def serves(self, kind: Kind) -> bool:
        """Whether the API server knows a kind."""
        ...


class Sink(watches.Sink, Protocol):
    """Where news goes, on the event loop."""

    def say_unavailable(self, kind: Kind, namespace: str | None, why: str | None) -> None:
        """Take in that a kind can't be had in a namespace (None: in any), or (`why` is None) that it can."""
        ...


#: Runs a blocking call elsewhere: `await run(function, *arguments)`.
Run = Callable[..., Awaitable[Any]]


class OptionalKind:
    """Follows one kind in all namespaces of interest. `run` runs a blocking call elsewhere."""

    def __init__(self, source: Source, sink: Sink, kind: Kind, namespaces: Sequence[str | None], run: Run) -> None:
        self._source = source
        self._sink = sink
        self._kind = kind
        self._namespaces = tuple(namespaces)
        self._run = run
        self._watches = watches.Watches(source, sink)

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
            if self._watches.follows(self._kind, namespace):
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
        self._watches.begin(self._kind, namespace, version)
        self._sink.say_unavailable(self._kind, namespace, None)

    async def compare(self) -> None:
        """Compare what is followed with lists; say where that fails."""
        for namespace in self._namespaces:
            if not self._watches.follows(self._kind, namespace):
                continue
            try:
                items, version = await self._run(self._source.list, self._kind, namespace, LABEL_NAME)
            except ApiError as error:
                log.warning("list failed kind=%s where=%s error=%s", self._kind.plural, namespace, error)
            else:
                self._sink.take_list(self._kind, items, version, namespace)

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
        return self._watches.problems()

    def end(self) -> None:
        """Stop following; what is on its way is ignored."""
        self._watches.end()
