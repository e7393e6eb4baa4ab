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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from dcp_operator import group_writes
from dcp_operator.apply import Applier
from dcp_operator.background import Background
from dcp_operator.brake import Brake
from dcp_operator.calls import THREADS, Calls
from dcp_operator.canary_checks import Probe, TransferChecks
from dcp_operator.canary_http import HttpProbe
from dcp_operator.catalogue import Catalogue
from dcp_operator.catalogue_file import CatalogueFile
from dcp_operator.client import Api
from dcp_operator.gather import WATCHED_KINDS, Cache
from dcp_operator.group_restarts import due_restarts
from dcp_operator.kinds import OPTIONAL_KINDS
from dcp_operator.lists import Lists
from dcp_operator.logs import pass_over
from dcp_operator.metrics import DEFECT, RECONCILE_ERRORS, RECONCILE_SECONDS
from dcp_operator.observed import Key, Observed
from dcp_operator.plan import Plan, make_plan
from dcp_operator.pod_logs import PodLogs
from dcp_operator.pod_pages import PodPages
from dcp_operator.reasons import Problem, Reason
from dcp_operator.renderings import Renderings
from dcp_operator.reports import Reporter
from dcp_operator.status import ready_condition
from dcp_operator.target import Operator, Target, resolve_target

log = logging.getLogger(__name__)

#: Pauses after a pass that could not do what it wanted: the first, and the longest.
BACKOFF_FIRST_S: Final = 1.0
BACKOFF_MAX_S: Final = 60.0
#: From the end of a pass to the next one of the same object at least, in seconds.
SETTLE_S: Final = 0.02


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
        calls: Calls | None = None,
    ) -> None:
        self._api = api
        self._models = models
        self._operator = operator
        self._now = now
        self._fresh_key = fresh_key
        self._cache = Cache()
        self._renderings = Renderings()
        self._calls = calls or Calls()
        self._applier = Applier(api, self._cache, self._calls.run, PodPages().read, self._calls.give_way)
        self._checks = TransferChecks(probe or HttpProbe(partial(secrets.token_hex, 8)), self.wake, now)
        self._wakers: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._background = Background()
        #: What is known of the cluster; its news wakes objects.
        self.lists = Lists(api, self._cache, namespaces, self._calls.ask, self, self._background)
        self._reporter = Reporter(self._applier, PodLogs(api, self._calls.run), self._checks, now)
        self._brakes: dict[Key, Brake] = {}
        #: When an object has to be looked at again although nothing happens, in seconds from the end of its pass.
        self._due_s: dict[Key, float] = {}

    async def start(self) -> None:
        """Read everything once, then begin: an object is never judged before its children are known.

        A namespace of several that refuses is left out until it doesn't. Raises ApiError where else something can't be
        listed.
        """
        await self.lists.start()
        if self._models is not None:
            self._background.spawn(self._models.keep_fresh(self.use_catalogue), "reading the catalogue")
        self.wake_all()
        log.info("watching objects=%d", len(self._tasks))

    def use_catalogue(self, catalogue: Catalogue) -> None:
        """Judge all objects by another catalogue from now on; what runs is not touched by it."""
        self._operator = replace(self._operator, catalogue=catalogue)
        self.wake_all()

    async def stop(self) -> None:
        """End all tasks; a write that has begun is finished."""
        await self._checks.stop()
        # Nothing begins to follow anything any more, then nothing wakes anybody, then nobody is left to be woken.
        await self._background.stop()
        self.lists.end()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._calls.close()

    def wake(self, key: Key) -> None:
        """Have an object looked at, now or as soon as its present pass ends."""
        if not self.lists.is_known(key.namespace):
            return
        waker = self._wakers.setdefault(key, asyncio.Event())
        waker.set()
        if key not in self._tasks:
            task = asyncio.create_task(self._attend(key, waker), name=f"reconcile {key}")
            self._tasks[key] = task
            task.add_done_callback(partial(self._take_in_end_of_care, key))

    def wake_all(self, namespace: str | None = None) -> None:
        """Have all objects of a namespace (None: of all) looked at."""
        for key in self._cache.keys():  # noqa: SIM118 - not a mapping
            if namespace in (None, key.namespace):
                self.wake(key)

    def problems(self) -> list[str]:
        """Return what keeps the objects from being looked after. Safe from every thread."""
        stuck = self._calls.stuck()
        return [
            *([f"reconciling does not end for: {', '.join(stuck)}"] if stuck else []),
            *self._background.problems(),
            *self.lists.problems(),
        ]

    async def reconcile(self, key: Key) -> bool:
        """Make one pass over an object; return whether everything that was to be done is done."""
        observed = self._cache.snapshot(key)
        if observed is None or observed.is_deleting:
            return True
        target = resolve_target(observed, self._operator, self._fresh_key(), self._now(), self._renderings)
        self._cache.lend_ports(key, target.host_ports)
        plan = Plan()
        if target.revision is not None:
            if _is_outdated(observed):
                # Said before anything is touched: at no moment do pods change under a Ready of the spec before.
                problems = await self._report(observed, target, [])
                told = self._unchanged(observed)
                if told is None:
                    return True
                if _is_outdated(told):
                    return _is_done(problems)
                observed = told
            plan = make_plan(target, observed, self._now())
        problems = await self._carry_out(plan, observed)
        acted = self._unchanged(observed)
        if acted is None:
            return True
        problems += await self._restart_groups(acted, target)
        after = self._unchanged(observed)
        if after is None:
            return True
        problems += await self._report(after, target, problems)
        return _is_done(problems)

    def _unchanged(self, judged: Observed) -> Observed | None:
        """Return what is known by now of an object that a pass judged.

        None where it is another one or its spec has changed meanwhile: what the pass knows is about neither. It is
        looked at again then.
        """
        present = self._cache.snapshot(judged.key)
        if present is None or (present.uid, present.generation) == (judged.uid, judged.generation):
            return present
        self.wake(judged.key)
        return None

    async def _restart_groups(self, observed: Observed, target: Target) -> list[Problem]:
        """Make the groups anew that are due; return what could not be done."""
        if target.spec is None:
            return []
        decisions = due_restarts(observed, target.spec, self._now())
        done, problems = await group_writes.carry_out(decisions, observed, self._api, self._cache, self._calls.run)
        for child, restart in done:
            words = f"group {restart.index} of {child.ref} is made anew, time {restart.times} in a row: {restart.why}"
            await self._applier.record(observed, Reason.GROUP_RECREATED, words, is_warning=True, now=self._now())
        waits = [decision.next_s for _, decision in decisions if decision.next_s is not None]
        if waits:
            self._look_again_in(observed.key, min(waits))
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
                # Not `wait_for`: of Python 3.11 it loses a cancellation that comes right after what it waits for.
                async with asyncio.timeout(pause):
                    await waker.wait()
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
        self._background.spawn(self._wake_later(key))

    async def _wake_later(self, key: Key) -> None:
        await asyncio.sleep(BACKOFF_MAX_S)
        self.wake(key)


def _is_outdated(observed: Observed) -> bool:
    """Whether the status calls an object Ready whose spec has changed since."""
    return (
        observed.status.get("observedGeneration") != observed.generation
        and ready_condition(observed.status).get("status") == "True"
    )


def _is_done(problems: Sequence[Problem]) -> bool:
    """Whether a pass did all that was to be done; what it could not do is counted."""
    for reason in {problem.reason for problem in problems}:
        RECONCILE_ERRORS.labels(reason).inc()
    return not problems


def backoff(failures: int) -> float:
    """Return the pause after so many failed passes in a row, in seconds."""
    return min(BACKOFF_FIRST_S * 2 ** min(failures - 1, 10), BACKOFF_MAX_S)


def num_connections(namespaces: Sequence[str]) -> int:
    """Return how many connections to the API server are used at most: one for each thread of a pass, and of a watch."""
    return THREADS + (len(WATCHED_KINDS) + len(OPTIONAL_KINDS) - 1) * max(1, len(namespaces))
