"""What the operator knows of the cluster, and from where: lists and watches that feed the cache, and wake objects.

An object is not judged before all its kinds have been listed in its namespace. From then on watches tell what happens,
and every so often a list is compared with what they told. kopf watches the object's own kind, `dcp_operator.watches`
all others.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from dcp_operator import watches
from dcp_operator.background import Background
from dcp_operator.client import ApiError
from dcp_operator.gather import WATCHED_KINDS, Cache
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, OPTIONAL_KINDS, Kind
from dcp_operator.metrics import WATCH_EVENTS, WATCH_RESTARTS
from dcp_operator.names import LABEL_NAME
from dcp_operator.observed import Body, Key
from dcp_operator.optional_kinds import OptionalKind, Run, Source

log = logging.getLogger(__name__)

#: Every so often all is listed and compared with what is known, whatever the watches said.
RESYNC_S: Final = 300.0
#: After so many lists every object is looked at again, whatever they showed.
LOOK_AT_ALL: Final = 12
#: Every so often a namespace that refused a list is asked again.
REFUSED_RETRY_S: Final = 30.0
#: Every so often a watch that has ended for good is begun anew.
FOLLOW_S: Final = 10.0
#: kopf begins a watch with an event for everything; one list is made for all of them, so much later.
RELIST_S: Final = 1.0
#: A watch that owes news for longer tells nothing any more: the liveness probe fails, in seconds.
SILENT_S: Final = 60.0

#: A kind in a namespace (None: in all).
Place = tuple[Kind, str | None]


class Wakes(Protocol):
    """Who wants to know that something changed."""

    def wake(self, key: Key) -> None:
        """Have an object looked at."""
        ...

    def wake_all(self, namespace: str | None = None) -> None:
        """Have all objects of a namespace (None: of all) looked at."""
        ...


class Lists:
    """Keeps a cache true. `ask` makes a blocking call elsewhere. No namespaces are all of them."""

    def __init__(
        self,
        source: Source,
        cache: Cache,
        namespaces: Sequence[str],
        ask: Run,
        wakes: Wakes,
        background: Background,
    ) -> None:
        self._source = source
        self._cache = cache
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._ask = ask
        self._wakes = wakes
        self._background = background
        self._watches = watches.Watches(source, self)
        self._optional = [OptionalKind(source, self, kind, self._namespaces, ask) for kind in OPTIONAL_KINDS]
        #: What was never listed: objects of such a namespace can't be judged.
        self._unknown = {(kind, namespace) for kind in WATCHED_KINDS for namespace in self._namespaces}
        #: What the API server refused to list when it was asked last.
        self._refused: set[tuple[Kind, str]] = set()
        #: Why a place could not be listed when that was said last.
        self._failing: dict[Place, str] = {}
        #: Places whose watch has not told yet what a list showed, and since when.
        self._owed_since: dict[Place, float] = {}
        #: Kinds that kopf watches and that are about to be listed because their watch began anew.
        self._relist: set[Kind] = set()
        self._started = False

    @property
    def is_started(self) -> bool:
        """Whether everything has been listed once."""
        return self._started

    def is_known(self, namespace: str) -> bool:
        """Whether everything in a namespace has been listed once, so that its objects can be judged."""
        return self._started and all(namespace != unknown for _, unknown in self._unknown)

    async def start(self) -> None:
        """List everything once and follow it. What is followed already stays so where this is tried again.

        A namespace of several that refuses is left out until it doesn't. Raises ApiError where else something can't be
        listed.
        """
        for place in self._places():
            if not self._watches.follows(*place):
                await self._follow(*place)
        for optional in self._optional:
            await optional.look()
        self._started = True
        for optional in self._optional:
            self._background.spawn(optional.keep_looking(), "looking for optional kinds")
        self._background.spawn(self._resync_forever(), "the comparison with lists")
        self._background.spawn(self._ask_refused_forever(), "asking for namespaces that refused")
        self._background.spawn(self._keep_following(), "looking after watches")

    def end(self) -> None:
        """Stop following; what is on its way is ignored."""
        self._watches.end()
        for optional in self._optional:
            optional.end()

    def problems(self) -> list[str]:
        """Return which watches tell nothing. Safe from every thread."""
        before = time.monotonic() - SILENT_S
        owed = list(self._owed_since.items())
        silent = sorted({kind.plural for (kind, _), since in owed if since < before})
        return [
            *([f"a list shows news that the watch does not tell, of: {', '.join(silent)}"] if silent else []),
            *self._watches.problems(),
            *(words for optional in self._optional for words in optional.problems()),
        ]

    def on_event(self, kind: Kind, event_type: str | None, body: Body) -> None:
        """Take in one watch event; `event_type` is None for what kopf lists when it begins a watch."""
        body = {**body, "apiVersion": kind.api_version, "kind": kind.kind}
        WATCH_EVENTS.labels(kind.plural).inc()
        self._owed_since.pop((kind, body["metadata"]["namespace"] if self._namespaces[0] else None), None)
        if event_type is None and self._started and kind not in self._relist:
            # The watch began anew: what was deleted in between is in no event.
            WATCH_RESTARTS.labels(kind.plural).inc()
            self._relist.add(kind)
            self._background.spawn(self._relist_soon(kind))
        self._wake(self._cache.drop(body) if event_type == "DELETED" else self._cache.store(body))

    def take_list(self, kind: Kind, items: Iterable[Body], version: str, namespace: str | None) -> None:
        """Take in a list with which a watch begins anew."""
        self._owed_since.pop((kind, namespace), None)
        self._wake(self._cache.correct(kind, items, version, namespace))

    def say_unavailable(self, kind: Kind, namespace: str | None, why: str | None) -> None:
        """Take in that a kind can't be had in a namespace (None: in any), or (`why` is None) that it can."""
        if self._cache.say_unavailable(kind, namespace, why):
            log.info("optional kind looked for kind=%s where=%s missing_because=%s", kind.plural, namespace, why)
            self._wakes.wake_all(namespace)

    async def refresh(self, kind: Kind) -> None:
        """Compare the cache with a list of a kind and wake whose objects differ; say where that fails."""
        for namespace in self._namespaces:
            await self._try(self._refresh_in, kind, namespace)

    async def compare(self) -> None:
        """Compare everything with lists, whatever the watches said."""
        for kind in WATCHED_KINDS:
            await self.refresh(kind)
        for optional in self._optional:
            await optional.compare()

    def _places(self) -> Iterator[Place]:
        return ((kind, namespace) for kind in WATCHED_KINDS for namespace in self._namespaces)

    async def _follow(self, kind: Kind, namespace: str | None) -> None:
        """List a kind in a namespace and follow it from there, unless it is refused. Raises ApiError."""
        version = await self._refresh_in(kind, namespace)
        if version is None or kind is DEPLOYMENT_OF_ENGINES or self._watches.follows(kind, namespace):
            return
        self._watches.begin(kind, namespace, version)
        # What the list showed happened before this watch: it owes none of it.
        self._owed_since.pop((kind, namespace), None)

    async def _refresh_in(self, kind: Kind, namespace: str | None) -> str | None:
        """Compare with a list of one namespace; return its version, None where it is refused. Raises ApiError."""
        selector = "" if kind is DEPLOYMENT_OF_ENGINES else LABEL_NAME
        try:
            items, version = await self._ask(self._source.list, kind, namespace, selector)
        except ApiError as error:
            if namespace is None or error.status != 403:
                raise
            if all(namespace != refused for _, refused in self._refused):
                log.warning(
                    "namespace is not looked after namespace=%s error=%s: if it exists, the operator's Role in it is "
                    "gone: upgrade its Helm release. Other namespaces are not affected; this one is tried again",
                    namespace,
                    error,
                )
            self._refused.add((kind, namespace))
            return None
        self._unknown.discard((kind, namespace))
        self._failing.pop((kind, namespace), None)
        if self._started and self._cache.is_behind(items):
            self._owed_since.setdefault((kind, namespace), time.monotonic())
        self._wake(self._cache.correct(kind, items, version, namespace))
        if namespace is not None and (kind, namespace) in self._refused:
            self._refused.discard((kind, namespace))
            if all(namespace != refused for _, refused in self._refused):
                log.info("namespace is looked after from now on namespace=%s", namespace)
                self._wakes.wake_all(namespace)
        return version

    def _wake(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._wakes.wake(key)

    async def _resync_forever(self) -> None:
        looked = 0
        while True:
            await asyncio.sleep(RESYNC_S)
            # What the lists show to be otherwise is looked at; a pass over what is as it was would say the same again.
            await self.compare()
            looked += 1
            if looked % LOOK_AT_ALL == 0:
                self._wakes.wake_all()

    async def _ask_refused_forever(self) -> None:
        while True:
            await asyncio.sleep(REFUSED_RETRY_S)
            for kind, namespace in sorted(self._refused, key=lambda pair: (pair[1], pair[0].plural)):
                await self._try(self._follow, kind, namespace)

    async def _keep_following(self) -> None:
        """Begin anew what has ended: the API server refused it or knew the kind no longer, or a defect ended it."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            for kind, namespace in self._places():
                if kind is DEPLOYMENT_OF_ENGINES or (kind, namespace) in self._refused:
                    continue
                if not self._watches.follows(kind, namespace):
                    await self._try(self._follow, kind, namespace)

    async def _relist_soon(self, kind: Kind) -> None:
        await asyncio.sleep(RELIST_S)
        self._relist.discard(kind)
        await self.refresh(kind)

    async def _try(
        self, look: Callable[[Kind, str | None], Awaitable[object]], kind: Kind, namespace: str | None
    ) -> None:
        """Look at a place; say why where that fails, but not the same twice in a row."""
        try:
            await look(kind, namespace)
        except ApiError as error:
            if self._failing.get((kind, namespace)) != error.reason:
                log.warning("list failed kind=%s where=%s error=%s: it is tried again", kind.plural, namespace, error)
            self._failing[kind, namespace] = error.reason
