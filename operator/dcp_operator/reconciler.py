"""The loop: one task per object that wakes on a change, compares, acts, reports, and waits again.

Level-triggered: a wake-up carries no information but "look again", so events that come together are one look, and an
event that is lost costs no more than the time to the next resync.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from dcp_operator.apply import Applier
from dcp_operator.brake import Brake
from dcp_operator.catalogue import Catalogue
from dcp_operator.catalogue_file import CatalogueFile
from dcp_operator.client import Api, ApiError
from dcp_operator.gather import WATCHED_KINDS, Cache
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, Kind
from dcp_operator.names import LABEL_NAME
from dcp_operator.observed import Body, Key, Observed
from dcp_operator.plan import Plan, make_plan
from dcp_operator.reasons import Problem, Reason
from dcp_operator.status import make_status, ready_condition
from dcp_operator.target import Operator, resolve_target

log = logging.getLogger(__name__)

#: Every so often all is listed and looked at again, whatever the watches said.
RESYNC_S: Final = 300.0
#: Every so often a namespace that refused a list is asked again.
REFUSED_RETRY_S: Final = 30.0
#: Pauses after a pass that could not do what it wanted: the first, and the longest.
BACKOFF_FIRST_S: Final = 1.0
BACKOFF_MAX_S: Final = 60.0
#: A pass that takes longer is stuck: the liveness probe fails.
STUCK_S: Final = 180.0
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
    ) -> None:
        self._api = api
        self._models = models
        self._operator = operator
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._now = now
        self._fresh_key = fresh_key
        self._cache = Cache()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="api")
        self._applier = Applier(api, self._cache, self._run)
        self._wakers: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._busy_since: dict[Key, float] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._relist: set[Kind] = set()
        self._brakes: dict[Key, Brake] = {}
        #: When an object has to be looked at again although nothing happens, in seconds from the end of its pass.
        self._due_s: dict[Key, float] = {}
        #: What was never listed: objects of such a namespace can't be judged.
        self._unknown = {(kind, namespace) for kind in WATCHED_KINDS for namespace in self._namespaces}
        #: What the API server refused to list when it was asked last.
        self._refused: set[tuple[Kind, str]] = set()
        self._started = False

    async def start(self) -> None:
        """Read everything once, then begin: an object is never judged before its children are known.

        A namespace of several that refuses is left out until it doesn't. Raises ApiError where else something can't be
        listed.
        """
        for kind in WATCHED_KINDS:
            await self.refresh(kind)
        self._started = True
        self._spawn(self._resync_forever())
        self._spawn(self._ask_refused_forever())
        if self._models is not None:
            self._spawn(self._models.keep_fresh(self.use_catalogue))
        self._wake_all()
        log.info("watching objects=%d", len(self._tasks))

    def use_catalogue(self, catalogue: Catalogue) -> None:
        """Judge all objects by another catalogue from now on; what runs is not touched by it."""
        self._operator = replace(self._operator, catalogue=catalogue)
        self._wake_all()

    async def stop(self) -> None:
        """End all tasks; a write that has begun is finished."""
        tasks = [*self._tasks.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pool.shutdown(wait=True)

    def on_event(self, kind: Kind, event_type: str | None, body: Body) -> None:
        """Take in one watch event; `event_type` is None for what a watch lists when it begins."""
        body = {**body, "apiVersion": kind.api_version, "kind": kind.kind}
        if event_type is None and self._started and kind not in self._relist:
            # The watch began anew: what was deleted in between is in no event.
            self._relist.add(kind)
            self._spawn(self._relist_soon(kind))
        for key in self._cache.drop(body) if event_type == "DELETED" else self._cache.store(body):
            self.wake(key)

    def wake(self, key: Key) -> None:
        """Have an object looked at, now or as soon as its present pass ends."""
        if not self._started or any(namespace == key.namespace for _, namespace in self._unknown):
            return
        waker = self._wakers.setdefault(key, asyncio.Event())
        waker.set()
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._attend(key, waker), name=f"reconcile {key}")

    def stuck(self) -> list[Key]:
        """Return the objects whose pass does not end."""
        limit = time.monotonic() - STUCK_S
        return [key for key, since in self._busy_since.items() if since < limit]

    async def refresh(self, kind: Kind) -> None:
        """Compare the cache with a list of a kind and wake whose objects differ.

        Raises ApiError, but not where one of several namespaces is closed to the operator.
        """
        for namespace in self._namespaces:
            await self._refresh_in(kind, namespace)

    async def _refresh_in(self, kind: Kind, namespace: str | None) -> None:
        selector = "" if kind is DEPLOYMENT_OF_ENGINES else LABEL_NAME
        try:
            items, version = await self._run(self._api.list, kind, namespace, selector)
        except ApiError as error:
            if namespace is None or error.status != 403:
                raise
            if all(namespace != refused for _, refused in self._refused):
                log.warning(
                    "namespace=%s can't be looked after: %s. If it exists, the operator's Role in it is gone: upgrade "
                    "its Helm release. Other namespaces are not affected; this one is tried again",
                    namespace,
                    error,
                )
            self._refused.add((kind, namespace))
            return
        self._unknown.discard((kind, namespace))
        for key in self._cache.correct(kind, items, version, namespace):
            self.wake(key)
        if namespace is not None and (kind, namespace) in self._refused:
            self._refused.discard((kind, namespace))
            if all(namespace != refused for _, refused in self._refused):
                log.info("namespace=%s is looked after from now on", namespace)
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
        target = resolve_target(observed, self._operator, self._fresh_key())
        plan = Plan(blocked=(unknown,) if unknown is not None else ())
        if target.revision is not None and unknown is None:
            plan = make_plan(target.manifests, target.revision, observed, self._now())
        problems = await self._carry_out(plan, observed)
        after = self._cache.snapshot(key)
        if after is None or after.uid != observed.uid:
            return True
        if after.generation != observed.generation:
            # The spec changed while this pass was acting on the one before: what it would report is about neither.
            self.wake(key)
            return True
        status = make_status(after, target, problems, self._now())
        if status != after.status:
            problem = await self._applier.write_status(after, status)
            problems += [problem] if problem is not None else []
            await self._record_change(after, status)
        return not problems

    async def _carry_out(self, plan: Plan, observed: Observed) -> list[Problem]:
        """Carry out what is not to be waited with; return what could not be done."""
        key, now = observed.key, time.monotonic()
        brake = self._brakes.setdefault(key, Brake())
        admitted, wait_s = brake.admit(plan, now)
        problems = await self._applier.execute(admitted, observed)
        if wait_s is not None:
            self._due_s[key] = wait_s
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

    async def _record_change(self, observed: Observed, status: Body) -> None:
        """Record an event when Ready says something else than before."""
        before, after = ready_condition(observed.status), ready_condition(status)
        if (before.get("status"), before.get("reason")) == (after.get("status"), after.get("reason")):
            return
        reason = Reason(after["reason"])
        is_warning = after["status"] == "False" and not reason.is_progress
        log.info("ready=%s object=%s reason=%s message=%s", after["status"], observed.key, reason, after["message"])
        await self._applier.record(observed, reason, after["message"], is_warning=is_warning, now=self._now())

    async def _attend(self, key: Key, waker: asyncio.Event) -> None:
        """Look after one object as long as it exists."""
        failures = 0
        while True:
            waker.clear()
            self._busy_since[key] = time.monotonic()
            try:
                done = await self.reconcile(key)
            except Exception:
                # A defect in one object's pass must not end the care for it, nor for the others.
                log.exception("pass failed object=%s", key)
                done = False
            finally:
                self._busy_since.pop(key, None)
            failures = 0 if done else failures + 1
            if self._cache.snapshot(key) is None and not waker.is_set():
                del self._tasks[key], self._wakers[key]
                self._brakes.pop(key, None)
                self._due_s.pop(key, None)
                return
            pause = self._due_s.pop(key, None)
            if failures:
                pause = backoff(failures) * random.uniform(0.8, 1.2)  # noqa: S311 - spreads retries
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waker.wait(), pause)
            if failures:
                # Changes come in bursts; a pass that just failed is not repeated for each of them.
                await asyncio.sleep(min(backoff(failures), 1.0))

    async def _resync_forever(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_S)
            for kind in WATCHED_KINDS:
                await self._try_refresh(kind)
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

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)


def backoff(failures: int) -> float:
    """Return the pause after so many failed passes in a row, in seconds."""
    return min(BACKOFF_FIRST_S * 2 ** min(failures - 1, 10), BACKOFF_MAX_S)
