"""What a pass says of its object: the status within its write budget, events at changes, and facts for the metrics.

A change of what matters (Ready, Available, Progressing, or the generation that is spoken of) is written at once.
What else changes while pods come and go is written at most once a second: what a pass leaves unwritten, the pass that
follows when the second is over computes anew, so the last word is never lost.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from dcp_operator.api.spec import Spec
from dcp_operator.canary_checks import TransferChecks
from dcp_operator.engine_restarts import EngineRestarts
from dcp_operator.metrics import ENGINE_RESTARTS, OBJECTS, ObjectFacts
from dcp_operator.observed import Body, Child, Key, Observed
from dcp_operator.pod_logs import PodLogs
from dcp_operator.reasons import Problem, Reason
from dcp_operator.replicas import wanted
from dcp_operator.rollout import asked_replicas, missing_scaler
from dcp_operator.scaler_status import changed_scalers
from dcp_operator.settings import Role, role_spec
from dcp_operator.status import goals, is_same, make_status, may_wait, news
from dcp_operator.target import Target

log = logging.getLogger(__name__)

#: Least time between two writes of an object's status that say no more than progress, in seconds.
PAUSE_S: Final = 1.0


class ReportWrites(Protocol):
    """What reports need of `dcp_operator.apply.Applier`."""

    async def write_status(self, observed: Observed, status: Body) -> Problem | None:
        """Write the status; return why it was not written."""
        ...

    async def write_scaler_status(self, observed: Observed, scaler: Child, status: Body) -> Problem | None:
        """Write the status of a scaler; return why it was not written."""
        ...

    async def record(self, observed: Observed, reason: str, message: str, *, is_warning: bool, now: str) -> None:
        """Record an event about the object."""
        ...


class Reporter:
    """Reports of all objects. `now` gives the time as RFC 3339, `clock` seconds of a clock that never goes back."""

    def __init__(
        self,
        writes: ReportWrites,
        pod_logs: PodLogs,
        checks: TransferChecks,
        now: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writes = writes
        self._pod_logs = pod_logs
        self._checks = checks
        self._restarts = EngineRestarts()
        self._now = now
        self._clock = clock
        #: When an object's status was written last.
        self._written: dict[Key, float] = {}

    async def report(
        self, observed: Observed, target: Target, problems: list[Problem]
    ) -> tuple[list[Problem], float | None]:
        """Say how an object is, whose pass met `problems`.

        Return what could not be written, and in how many seconds there may be something else to say (None: never by
        itself).
        """
        observed = await self._pod_logs.complete(observed)
        check, rollout = self._checks.look(observed, target.spec), target.rollout
        held = rollout.waits_for if rollout is not None else None
        status = make_status(
            observed, target, problems, self._now(), transfer=check.said, checked=check.status, held=held
        )
        serving: str | None = status.get("currentRevision")
        if serving != observed.status.get("currentRevision"):
            # A verdict is one of the revision that serves by now: no event follows the write that says which.
            told = self._checks.tell(observed, target.spec, serving)
            status = make_status(
                observed, target, problems, self._now(), transfer=told.said, checked=told.status, held=held
            )
        self.leave_facts(observed.key, facts_of(observed, target.spec, status))
        problem, written_in_s = await self.publish(observed, status)
        if problem is None and written_in_s is None:
            # Checks go by what users see. No event follows a write of ours, so what it makes due is found here.
            check = self._checks.look(replace(observed, body={**observed.body, "status": status}), target.spec)
        unwritten = [problem] if problem is not None else []
        unwritten += await self._tell_scalers(observed, target)
        await self._tell_restarts(observed)
        waits = (written_in_s, check.due_s, _next_step_s(observed, target))
        return unwritten, min((wait for wait in waits if wait is not None), default=None)

    async def publish(self, observed: Observed, status: Body) -> tuple[Problem | None, float | None]:
        """Write the status if it says something new; return why it wasn't written, or in how many seconds it is due."""
        if is_same(status, observed.status):
            return None, None
        now = self._clock()
        wait_s = self._written.get(observed.key, now - PAUSE_S) + PAUSE_S - now
        if wait_s > 0 and may_wait(status, observed.status):
            return None, wait_s
        problem = await self._writes.write_status(observed, status)
        if problem is not None:
            return problem, None
        self._written[observed.key] = now
        for each in news(observed.status, status):
            log.info("changed object=%s reason=%s words=%s", observed.key, each.reason, each.message)
            await self._writes.record(observed, each.reason, each.message, is_warning=each.is_warning, now=self._now())
        return None, None

    async def _tell_scalers(self, observed: Observed, target: Target) -> list[Problem]:
        """Tell autoscalers what their numbers became; return why that could not be written."""
        if target.spec is None:
            return []
        changed = changed_scalers(observed, target.spec, self._now())
        written = [await self._writes.write_scaler_status(observed, scaler, status) for scaler, status in changed]
        return [problem for problem in written if problem is not None]

    async def _tell_restarts(self, observed: Observed) -> None:
        """Record an event for each engine that started anew in its pod."""
        for restart in self._restarts.look(observed):
            ENGINE_RESTARTS.labels(restart.role).inc()
            log.warning("engine restarted object=%s words=%s", observed.key, restart.message)
            reason, now = Reason.ENGINE_RESTARTED, self._now()
            await self._writes.record(observed, reason, restart.message, is_warning=True, now=now)

    def leave_facts(self, key: Key, facts: ObjectFacts) -> None:
        """Have the metrics tell what a pass found."""
        OBJECTS.facts[key] = facts

    def forget(self, key: Key) -> None:
        """Take in that an object is gone."""
        self._written.pop(key, None)
        self._checks.forget(key)
        self._restarts.forget(key)
        OBJECTS.facts.pop(key, None)


def _next_step_s(observed: Observed, target: Target) -> float | None:
    """Return in how many seconds the next step of a rollout is another, though nothing happens; None where it isn't."""
    rollout, spec, revision = target.rollout, target.spec, target.revision
    if rollout is None or spec is None or revision is None:
        return None
    if rollout.lacks_scaler and missing_scaler(observed, spec, revision) is None:
        # It was made in this pass, and no event follows a write of ours.
        return 0.0
    return rollout.look_again_s


def facts_of(observed: Observed, spec: Spec | None, status: Body) -> ObjectFacts:
    """Return what the metrics tell of an object."""
    if spec is None:
        return ObjectFacts(status)
    said = wanted(spec, asked_replicas(observed, spec))
    scalers: dict[str, dict[str, int]] = {}
    for role in Role:
        scaling, of_role = role_spec(spec, role).scaling, said.of(role)
        if scaling is not None:
            bounds = {"min": scaling.min_replicas, "max": scaling.max_replicas}
            scalers[role] = {"asked": of_role.asked, "wanted": of_role.replicas, **bounds}
    return ObjectFacts(status, goals(observed, spec) or {}, scalers)
