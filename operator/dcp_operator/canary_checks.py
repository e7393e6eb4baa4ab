"""The checks of all objects' KV transfer: begun when they are due, a few at a time, their results kept for the status.

A pass over an object looks in here and never waits. A check runs beside the passes and wakes its object when it ended.
After a restart of the controller the last result is read back from the object's own status. Nothing that happens to
pods depends on it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from dcp_operator.api.spec import Spec
from dcp_operator.api.status import TransferCheckStatus
from dcp_operator.canary.request import Request, request_of, subject_of
from dcp_operator.canary.result import Result, say, stored_result
from dcp_operator.canary.schedule import GAP_S, Attempts, Last, Subject, next_check
from dcp_operator.canary_http import Outcome
from dcp_operator.metrics import canary_ended, canary_forgotten, canary_sent
from dcp_operator.observed import Key, Observed
from dcp_operator.reasons import Reason, Said
from dcp_operator.times import seconds_between

log = logging.getLogger(__name__)

#: Checks that run at the same time.
_AT_ONCE: Final = 8


class Probe(Protocol):
    """Makes one check; `dcp_operator.canary_http.HttpProbe` does."""

    async def check(self, request: Request) -> Outcome:
        """Make one check."""
        ...


@dataclass(slots=True)
class _State:
    """What is known of one object's checks."""

    uid: str
    result: Result | None
    last: Last | None
    attempts: Attempts | None = None
    inconclusive: tuple[Subject, str] | None = None
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What an object's status says of its checks, and in how many seconds the next one is due, if one is."""

    said: Said
    status: TransferCheckStatus | None
    due_s: float | None


class TransferChecks:
    """All objects' checks. Used from one event loop.

    `wake` has an object looked at, `now` gives the time as RFC 3339, and `clock` seconds of a clock that never goes
    back.
    """

    def __init__(
        self,
        probe: Probe,
        wake: Callable[[Key], None],
        now: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe = probe
        self._wake = wake
        self._now = now
        self._clock = clock
        self._states: dict[Key, _State] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def look(self, observed: Observed, spec: Spec | None) -> Report:
        """Begin a check if one is due; return what there is to say of the last one, by the status that is stored."""
        state = self._state_of(observed)
        due_s = self._begin_if_due(observed, spec, state) if spec is not None and state.task is None else None
        return replace(self.tell(observed, spec, observed.status.get("currentRevision")), due_s=due_s)

    def tell(self, observed: Observed, spec: Spec | None, serving: str | None) -> Report:
        """Return what there is to say of the last check while a revision serves; None where none does."""
        state = self._state_of(observed)
        said = say(spec, serving, state.result, state.inconclusive)
        stands = said.status != "Unknown" and state.result is not None
        return Report(said, state.result.as_status() if stands and state.result else None, None)

    def _begin_if_due(self, observed: Observed, spec: Spec, state: _State) -> float | None:
        """Begin a check if one is due; return in how many seconds the next one is, None where none is or one runs."""
        subject, now_s = subject_of(observed, spec), self._clock()
        due_at = next_check(subject, spec.transfer_check.interval_seconds, state.last, state.attempts, now_s)
        if subject is None or due_at is None:
            return None
        if due_at > now_s:
            return due_at - now_s
        request = request_of(observed, spec, subject)
        if request is None:
            return GAP_S
        state.task = asyncio.create_task(self._run(observed.key, state, request), name=f"check {observed.key}")
        return None

    def forget(self, key: Key) -> None:
        """Take in that an object is gone."""
        canary_forgotten(key.namespace, key.name)
        state = self._states.pop(key, None)
        if state is not None and state.task is not None:
            state.task.cancel()

    async def stop(self) -> None:
        """End all checks."""
        tasks = [state.task for state in self._states.values() if state.task is not None]
        self._states.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _state_of(self, observed: Observed) -> _State:
        state = self._states.get(observed.key)
        if state is None or state.uid != observed.uid:
            self.forget(observed.key)
            result = stored_result(observed)
            state = self._states[observed.key] = _State(observed.uid, result, self._last_of(result))
        return state

    def _last_of(self, result: Result | None) -> Last | None:
        """Return a stored result's place on this clock. One from the future, by a clock that jumped, is from now."""
        if result is None:
            return None
        at_s = self._clock() - max(0.0, seconds_between(result.at, self._now()) or 0.0)
        return Last(result.subject, result.said.reason is Reason.VERIFIED, at_s)

    async def _run(self, key: Key, state: _State, request: Request) -> None:
        """Make a check and keep what it found."""
        try:
            async with self._slots:
                began = self._clock()
                outcome = await self._probe.check(request)
            said = outcome.verdict.said
            canary_ended(said.reason, self._clock() - began)
            canary_sent(key.namespace, key.name, outcome.num_prompts, request.num_tokens)
            level = logging.INFO if said.reason is Reason.VERIFIED else logging.WARNING
            log.log(level, "transfer checked object=%s reason=%s words=%s", key, said.reason, said.message)
            self._keep(state, request.subject, outcome)
        except Exception:
            # A defect in a check must not end the checks of this object.
            log.exception("check failed object=%s", key)
            self._missed(state, request.subject, "the check itself failed; the operator's log says how")
        state.task = None
        self._wake(key)

    def _keep(self, state: _State, subject: Subject, outcome: Outcome) -> None:
        said = outcome.verdict.said
        if not outcome.verdict.is_conclusive:
            self._missed(state, subject, said.message)
            return
        is_verified = said.reason is Reason.VERIFIED
        state.result, state.inconclusive = Result(subject, said, self._now()), None
        state.last = Last(subject, is_verified, self._clock())
        if is_verified:
            state.attempts = None
        else:
            self._count_failure(state, subject)

    def _missed(self, state: _State, subject: Subject, words: str) -> None:
        state.inconclusive = subject, words
        self._count_failure(state, subject)

    def _count_failure(self, state: _State, subject: Subject) -> None:
        same = state.attempts is not None and state.attempts.subject == subject
        failures = 1 + (state.attempts.failures if same and state.attempts else 0)
        state.attempts = Attempts(subject, failures, self._clock())
