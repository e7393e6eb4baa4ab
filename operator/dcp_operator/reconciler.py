"""The loop: one task per object that wakes on a change, compares, acts, reports, and waits again.

Level-triggered: a wake-up carries no information but "look again", so events that come together are one look, and an
event that is lost costs no more than the time to the next resync.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dcp_operator import group_writes
from dcp_operator.apply import Applier
from dcp_operator.brake import Brake
from dcp_operator.calls import Calls
from dcp_operator.canary_checks import Probe, TransferChecks
from dcp_operator.canary_http import HttpProbe
from dcp_operator.catalogue import Catalogue
from dcp_operator.catalogue_file import CatalogueFile
from dcp_operator.client import Api, ApiError
from dcp_operator.gather import WATCHED_KINDS, Cache
from dcp_operator.group_restarts import due_restarts
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, OPTIONAL_KINDS, Kind
from dcp_operator.logs import pass_over
from dcp_operator.metrics import (
    DEFECT,
    RECONCILE_ERRORS,
    RECONCILE_SECONDS,
    WATCH_EVENTS,
    WATCH_RESTARTS,
)
from dcp_operator.names import LABEL_NAME
from dcp_operator.observed import Body, Key, Observed
from dcp_operator.optional_kinds import OptionalKind
from dcp_operator.plan import Plan, make_plan
from dcp_operator.pod_logs import PodLogs
from dcp_operator.pod_pages import PodPages
from dcp_operator.reasons import Problem, Reason
from dcp_operator.renderings import Renderings
from dcp_operator.reports import Reporter
from dcp_operator.status import ready_condition
from dcp_operator.target import Operator, Target, resolve_target

log = logging.getLogger(__name__)

#: Every so often all is listed and compared with what is known, whatever the watches said.
RESYNC_S: Final = 300.0
#: After so many lists every object is looked at again, whatever they showed.
LOOK_AT_ALL: Final = 12
#: Every so often a namespace that refused a list is asked again.
REFUSED_RETRY_S: Final = 30.0
#: Pauses after a pass that could not do what it wanted: the first, and the longest.
BACKOFF_FIRST_S: Final = 1.0
BACKOFF_MAX_S: Final = 60.0
#: A watch that owes news for longer tells nothing any more: the liveness probe fails, in seconds.
SILENT_S: Final = 60.0
#: From the end of a pass to the next one of the same object at least, in seconds.
SETTLE_S: Final = 0.02
_THREADS: Final = 8


class Reconciler:
    """All objects' tasks. `now` gives the time as RFC 3339, `fresh_key` a new key for the control channel, base64."""

    def __init__(
        self,
        api: Api,
        operator: Operator,
        *,
        namespaces: tuple[str, ...] = (),
        now: Callable[[], str],
        fresh_key: Callable[[], str],
        models: CatalogueFile | None = None,
        probe: Probe | None = None,
    ) -> None:
        self._api = api
        self._models = models
        self._operator = operator
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._now = now
        self._fresh_key = fresh_key
        self._cache = Cache()
        self._renderings = Renderings()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="api")
        self._calls = Calls(self._pool)
        self._applier = Applier(api, self._cache, self._calls.run, PodPages().read)
        self._checks = TransferChecks(probe or HttpProbe(partial(secrets.token_hex, 8)), self.wake, now)
        self._wakers: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        #: What should run for ever and has ended.
        self._ended: set[str] = set()
        #: Watches (of a kind in a namespace) that have not told yet what a list showed, and since when.
        self._owed_since: dict[tuple[Kind, str | None], float] = {}
        self._reporter = Reporter(self._applier, PodLogs(api, self._calls.run), self._checks, now)
        self._relist: set[Kind] = set()
        self._brakes: dict[Key, Brake] = {}
        #: When an object has to be looked at again although nothing happens, in seconds from the end of its pass.
        self._due_s: dict[Key, float] = {}
        #: What was never listed: objects of such a namespace can't be judged.
        self._unknown = {(kind, namespace) for kind in WATCHED_KINDS for namespace in self._namespaces}
        #: What the API server refused to list when it was asked last.
        self._refused: set[tuple[Kind, str]] = set()
        self._optional = [OptionalKind(api, self, kind, self._namespaces, self._calls.ask) for kind in OPTIONAL_KINDS]
        self._started = False

    async def start(self) -> None:
        """Read everything once, then begin: an object is never judged before its children are known.

        A namespace of several that refuses is left out until it doesn't. Raises ApiError where else something can't be
        listed.
        """
        for kind in WATCHED_KINDS:
            await self.refresh(kind)
        for optional in self._optional:
            await optional.look()
        self._started = True
        for optional in self._optional:
            self._spawn(optional.keep_looking(), "looking for optional kinds")
        self._spawn(self._resync_forever(), "the comparison with lists")
        self._spawn(self._ask_refused_forever(), "asking for namespaces that refused")
        if self._models is not None:
            self._spawn(self._models.keep_fresh(self.use_catalogue), "reading the catalogue")
        self._wake_all()
        log.info("watching objects=%d", len(self._tasks))

    def use_catalogue(self, catalogue: Catalogue) -> None:
        """Judge all objects by another catalogue from now on; what runs is not touched by it."""
        self._operator = replace(self._operator, catalogue=catalogue)
        self._wake_all()

    async def stop(self) -> None:
        """End all tasks; a write that has begun is finished."""
        await self._checks.stop()
        for optional in self._optional:
            optional.end()
        tasks = [*self._tasks.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pool.shutdown(wait=True)

    def on_event(self, kind: Kind, event_type: str | None, body: Body) -> None:
        """Take in one watch event; `event_type` is None for what a watch lists when it begins."""
        body = {**body, "apiVersion": kind.api_version, "kind": kind.kind}
        WATCH_EVENTS.labels(kind.plural).inc()
        self._owed_since.pop((kind, body["metadata"]["namespace"] if self._namespaces[0] else None), None)
        if event_type is None and self._started and kind not in self._relist:
            # The watch began anew: what was deleted in between is in no event.
            WATCH_RESTARTS.labels(kind.plural).inc()
            self._relist.add(kind)
            self._spawn(self._relist_soon(kind))
        for key in self._cache.drop(body) if event_type == "DELETED" else self._cache.store(body):
            self.wake(key)

    def take_list(self, kind: Kind, items: Iterable[Body], version: str, namespace: str | None) -> None:
        """Take in a list of a kind that not every cluster has."""
        for key in self._cache.correct(kind, items, version, namespace):
            self.wake(key)

    def say_unavailable(self, kind: Kind, namespace: str | None, why: str | None) -> None:
        """Take in that a kind can't be had in a namespace (None: in any), or (`why` is None) that it can."""
        if self._cache.say_unavailable(kind, namespace, why):
            log.info("optional kind looked for kind=%s where=%s missing_because=%s", kind.plural, namespace, why)
            self._wake_all(namespace)

    def wake(self, key: Key) -> None:
        """Have an object looked at, now or as soon as its present pass ends."""
        if not self._started or any(namespace == key.namespace for _, namespace in self._unknown):
            return
        waker = self._wakers.setdefault(key, asyncio.Event())
        waker.set()
        if key not in self._tasks:
            task = asyncio.create_task(self._attend(key, waker), name=f"reconcile {key}")
            self._tasks[key] = task
            task.add_done_callback(partial(self._take_in_end_of_care, key))

    @property
    def is_started(self) -> bool:
        """Whether everything has been listed once."""
        return self._started

    def problems(self) -> list[str]:
        """Return what keeps the objects from being looked after. Safe from every thread."""
        now = time.monotonic()
        stuck = self._calls.stuck()
        owed = list(self._owed_since.items())
        silent = sorted({kind.plural for (kind, _), since in owed if since < now - SILENT_S})
        return [
            *([f"reconciling does not end for: {', '.join(stuck)}"] if stuck else []),
            *([f"a list shows news that the watch does not tell, of: {', '.join(silent)}"] if silent else []),
            *(f"{what} has ended" for what in sorted(self._ended)),
            *(words for optional in self._optional for words in optional.problems()),
        ]

    async def refresh(self, kind: Kind) -> None:
        """Compare the cache with a list of a kind and wake whose objects differ.

        Raises ApiError, but not where one of several namespaces is closed to the operator.
        """
        for namespace in self._namespaces:
            await self._refresh_in(kind, namespace)

    async def _refresh_in(self, kind: Kind, namespace: str | None) -> None:
        selector = "" if kind is DEPLOYMENT_OF_ENGINES else LABEL_NAME
        try:
            items, version = await self._calls.ask(self._api.list, kind, namespace, selector)
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
            return
        self._unknown.discard((kind, namespace))
        if self._started and self._cache.is_behind(items):
            self._owed_since.setdefault((kind, namespace), time.monotonic())
        for key in self._cache.correct(kind, items, version, namespace):
            self.wake(key)
        if namespace is not None and (kind, namespace) in self._refused:
            self._refused.discard((kind, namespace))
            if all(namespace != refused for _, refused in self._refused):
                log.info("namespace is looked after from now on namespace=%s", namespace)
                self._wake_all(namespace)

    async def reconcile(self, key: Key) -> bool:
        """Make one pass over an object; return whether everything that was to be done is done."""
        observed = self._cache.snapshot(key)
        if observed is None or observed.is_deleting:
            return True
        unknown = None
        if observed.kv_key() is None:
            unknown = await self._applier.find_key(observed)
            observed = self._cache.snapshot(key) or observed
        target = resolve_target(observed, self._operator, self._fresh_key(), self._now(), self._renderings)
        self._cache.lend_ports(key, target.host_ports)
        plan = Plan(blocked=(unknown,) if unknown is not None else ())
        if target.revision is not None and unknown is None:
            if _is_outdated(observed):
                # Said before anything is touched: at no moment do pods change under a Ready of the spec before.
                await self._report(observed, target, [])
                observed = self._cache.snapshot(key) or observed
            plan = make_plan(target, observed, self._now())
        problems = await self._carry_out(plan, observed)
        problems += await self._restart_groups(key, target)
        after = self._cache.snapshot(key)
        if after is None or after.uid != observed.uid:
            return True
        if after.generation != observed.generation:
            # The spec changed while this pass was acting on the one before: what it would report is about neither.
            self.wake(key)
            return True
        problems += await self._report(after, target, problems)
        for reason in {problem.reason for problem in problems}:
            RECONCILE_ERRORS.labels(reason).inc()
        return not problems

    async def _restart_groups(self, key: Key, target: Target) -> list[Problem]:
        """Make the groups anew that are due; return what could not be done."""
        observed = self._cache.snapshot(key)
        if observed is None or target.spec is None:
            return []
        decisions = due_restarts(observed, target.spec, self._now())
        done, problems = await group_writes.carry_out(decisions, observed, self._api, self._cache, self._calls.run)
        for child, restart in done:
            words = f"group {restart.index} of {child.ref} is made anew, time {restart.times} in a row: {restart.why}"
            await self._applier.record(observed, Reason.GROUP_RECREATED, words, is_warning=True, now=self._now())
        waits = [decision.next_s for _, decision in decisions if decision.next_s is not None]
        if waits:
            self._look_again_in(key, min(waits))
        return problems

    async def _report(self, observed: Observed, target: Target, problems: list[Problem]) -> list[Problem]:
        """Say how an object is; return why that could not be written."""
        unwritten, due_s = await self._reporter.report(observed, target, problems)
        if due_s is not None:
            self._look_again_in(observed.key, due_s)
        return unwritten

    def _look_again_in(self, key: Key, seconds: float) -> None:
        """Have an object looked at again after its present pass, at the latest after so many seconds."""
        self._due_s[key] = min(seconds, self._due_s.get(key, seconds))

    async def _carry_out(self, plan: Plan, observed: Observed) -> list[Problem]:
        """Carry out what is not to be waited with; return what could not be done."""
        key, now = observed.key, time.monotonic()
        brake = self._brakes.setdefault(key, Brake())
        admitted, wait_s = brake.admit(plan, now)
        problems = await self._applier.execute(admitted, observed)
        if wait_s is not None:
            self._look_again_in(key, wait_s)
        if not problems:
            for action, pause_s in brake.record(admitted, now):
                log.warning(
                    "undone again and again object=%s child=%s why=%s next_s=%d: find out who else changes it, for "
                    "example with kubectl get --show-managed-fields",
                    key,
                    action.ref,
                    action.why,
                    pause_s,
                )
        return problems

    async def _attend(self, key: Key, waker: asyncio.Event) -> None:
        """Look after one object as long as it exists."""
        failures = 0
        while True:
            waker.clear()
            began = time.monotonic()
            self._calls.begin(key)
            with pass_over(key.namespace, str(key), secrets.token_hex(4)):
                try:
                    done = await self.reconcile(key)
                except Exception:
                    # A defect in one object's pass must not end the care for it, nor for the others.
                    log.exception("pass failed object=%s", key)
                    RECONCILE_ERRORS.labels(DEFECT).inc()
                    done = False
                finally:
                    self._calls.end(key)
                    RECONCILE_SECONDS.observe(time.monotonic() - began)
            failures = 0 if done else failures + 1
            if not self._cache.knows(key) and not waker.is_set():
                del self._tasks[key], self._wakers[key]
                self._brakes.pop(key, None)
                self._due_s.pop(key, None)
                self._reporter.forget(key)
                return
            if failures:
                self._look_again_in(key, backoff(failures) * random.uniform(0.8, 1.2))  # noqa: S311 - spreads retries
            pause, ended = self._due_s.pop(key, None), time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waker.wait(), pause)
            # What happens to an object happens in bursts: the first event is looked at at once, what follows together.
            await asyncio.sleep(max(0.0, ended + SETTLE_S - time.monotonic()))
            if failures:
                # Changes come in bursts; a pass that just failed is not repeated for each of them.
                await asyncio.sleep(min(backoff(failures), 1.0))

    def _take_in_end_of_care(self, key: Key, task: asyncio.Task[None]) -> None:
        """Forget an object's task that a defect ended, so that the next one who wakes the object makes it anew."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("care ended and is begun anew object=%s next_s=%g", key, BACKOFF_MAX_S, exc_info=error)
        RECONCILE_ERRORS.labels(DEFECT).inc()
        del self._tasks[key], self._wakers[key]
        self._calls.end(key)
        self._spawn(self._wake_later(key))

    async def _wake_later(self, key: Key) -> None:
        await asyncio.sleep(BACKOFF_MAX_S)
        self.wake(key)

    async def _resync_forever(self) -> None:
        looked = 0
        while True:
            await asyncio.sleep(RESYNC_S)
            # What the lists show to be otherwise is looked at; a pass over what is as it was would say the same again.
            for kind in WATCHED_KINDS:
                await self._try_refresh(kind)
            looked += 1
            if looked % LOOK_AT_ALL == 0:
                self._wake_all()

    async def _ask_refused_forever(self) -> None:
        while True:
            await asyncio.sleep(REFUSED_RETRY_S)
            for kind, namespace in sorted(self._refused, key=lambda pair: (pair[1], pair[0].plural)):
                try:
                    await self._refresh_in(kind, namespace)
                except ApiError as error:
                    log.warning("list failed kind=%s namespace=%s error=%s", kind.plural, namespace, error)

    def _wake_all(self, namespace: str | None = None) -> None:
        for key in self._cache.keys():  # noqa: SIM118 - not a mapping
            if namespace in (None, key.namespace):
                self.wake(key)

    async def _relist_soon(self, kind: Kind) -> None:
        # One list for the many events with which a watch begins.
        await asyncio.sleep(1.0)
        self._relist.discard(kind)
        await self._try_refresh(kind)

    async def _try_refresh(self, kind: Kind) -> None:
        try:
            await self.refresh(kind)
        except ApiError as error:
            log.warning("list failed kind=%s error=%s", kind.plural, error)

    def _spawn(self, coroutine: Any, lasting: str | None = None) -> None:
        """Run a task beside the passes; `lasting` names one that should never end."""
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(lambda ended: self._take_in_end(ended, lasting))

    def _take_in_end(self, task: asyncio.Task[None], lasting: str | None) -> None:
        self._background.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("task failed task=%s", lasting or "list", exc_info=error)
        if lasting is not None:
            self._ended.add(lasting)


def _is_outdated(observed: Observed) -> bool:
    """Whether the status calls an object Ready whose spec has changed since."""
    return (
        observed.status.get("observedGeneration") != observed.generation
        and ready_condition(observed.status).get("status") == "True"
    )


def backoff(failures: int) -> float:
    """Return the pause after so many failed passes in a row, in seconds."""
    return min(BACKOFF_FIRST_S * 2 ** min(failures - 1, 10), BACKOFF_MAX_S)
