"""The only writer of the cluster: carries out a plan, writes the status, records events; failures become problems."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from dcp_operator import names
from dcp_operator.api.base import API_VERSION, KIND
from dcp_operator.build.objects import owner_reference
from dcp_operator.client import ApiError
from dcp_operator.difference import first_difference
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, SECRET, Kind, Ref, kind_named
from dcp_operator.observed import Body, Child, Key, Observed, Settled, essence
from dcp_operator.plan import Apply, Delete, Plan, name_taken, settled
from dcp_operator.reasons import Problem, Reason

log = logging.getLogger(__name__)

_MAX_EVENT_MESSAGE = 1024


class Writes(Protocol):
    """What of the API server's calls a plan needs; `dcp_operator.client.Api` has them."""

    def get(self, kind: Kind, namespace: str, name: str) -> Body | None:
        """Return an object, None if there is none."""
        ...

    def apply(self, kind: Kind, namespace: str, manifest: Body, subresource: str | None = None) -> Body:
        """Apply a manifest; return the object as it is then."""
        ...

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid, if it still exists."""
        ...

    def create_event(self, namespace: str, event: Body) -> None:
        """Record an event."""
        ...


class Memory(Protocol):
    """Where answers of the API server go: reads follow writes without waiting for the watch."""

    def store(self, body: Body) -> set[Key]:
        """Take in an object as it is now."""
        ...

    def settle(self, key: Key, ref: Ref, record: Settled) -> None:
        """Remember that applying a manifest changes nothing."""
        ...


#: Runs a blocking call elsewhere: `await run(function, *arguments)`.
Run = Callable[..., Awaitable[Any]]


class Applier:
    """Carries out decisions. Blocking calls go through `run`, the cache is touched by the caller's thread only."""

    def __init__(self, api: Writes, memory: Memory, run: Run) -> None:
        self._api = api
        self._memory = memory
        self._run = run

    async def execute(self, plan: Plan, observed: Observed) -> list[Problem]:
        """Carry out a plan in its order; return what could not be done.

        One refused manifest does not keep the others from being applied. An API server that does not answer ends the
        pass: it is tried again as a whole.
        """
        problems = list(plan.blocked)
        for action in plan.actions:
            try:
                problem = await self._carry_out(action, observed)
            except ApiError as error:
                problem = problem_of(error, f"{_verb(action)} {action.ref}")
                log.warning(
                    "action failed object=%s action=%s child=%s reason=%s error=%s",
                    observed.key,
                    _verb(action),
                    action.ref,
                    problem.reason,
                    error,
                )
            if problem is not None:
                problems.append(problem)
                if problem.reason is Reason.API_UNAVAILABLE:
                    break
        return problems

    async def find_key(self, observed: Observed) -> Problem | None:
        """Look for the control channel's key where no watch shows it: in an own Secret that lost its label.

        A new key would be refused by the engines that run. Return why that could not be looked up.
        """
        ref = Ref(SECRET.kind, names.key_secret(observed.key.name))
        try:
            found = await self._run(self._api.get, SECRET, observed.key.namespace, ref.name)
        except ApiError as error:
            log.warning("key not looked up object=%s error=%s", observed.key, error)
            return problem_of(error, f"read {ref}")
        if found is not None and Child(found).belongs_to(observed.uid):
            self._memory.store(found)
        return None

    async def write_status(self, observed: Observed, status: Body) -> Problem | None:
        """Write the status of exactly this object, not of a later one with its name."""
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": observed.key.name, "namespace": observed.key.namespace, "uid": observed.uid},
            "status": status,
        }
        try:
            body = await self._run(self._api.apply, DEPLOYMENT_OF_ENGINES, observed.key.namespace, manifest, "status")
        except ApiError as error:
            if error.status in (404, 409):
                return None
            log.warning("status not written object=%s error=%s", observed.key, error)
            return problem_of(error, "write the status")
        self._memory.store(body)
        return None

    async def record(self, observed: Observed, reason: str, message: str, *, is_warning: bool, now: str) -> None:
        """Record an event about the object. Events are help, not state: a failure is logged and forgotten."""
        owner = owner_reference(observed.key.name, observed.uid)
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{observed.key.name}.", "namespace": observed.key.namespace},
            "involvedObject": {
                **{key: owner[key] for key in ("apiVersion", "kind", "name", "uid")},
                "namespace": observed.key.namespace,
            },
            "type": "Warning" if is_warning else "Normal",
            "reason": reason,
            "message": message[:_MAX_EVENT_MESSAGE],
            "source": {"component": names.OPERATOR},
            "reportingComponent": names.OPERATOR,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._run(self._api.create_event, observed.key.namespace, event)
        except ApiError as error:
            log.info("event not recorded object=%s reason=%s error=%s", observed.key, reason, error)

    async def _carry_out(self, action: Apply | Delete, observed: Observed) -> Problem | None:
        kind, namespace = kind_named(action.ref.kind), observed.key.namespace
        if isinstance(action, Delete):
            await self._run(self._api.delete, kind, namespace, action.ref.name, action.uid)
            log.info("deleted object=%s child=%s why=%s", observed.key, action.ref, action.why)
            return None
        before = observed.children.get(action.ref)
        if action.is_new:
            # Applying would take over whatever has this name, so look first. It may be ours and not seen yet.
            found = await self._run(self._api.get, kind, namespace, action.ref.name)
            if found is not None:
                before = Child(found)
                if not before.belongs_to(observed.uid):
                    return name_taken(before, observed)
                if before.is_deleting:
                    return None
                if first_difference(action.manifest, found) is None:
                    self._memory.store(found)
                    return None
        body = await self._run(self._api.apply, kind, namespace, action.manifest)
        self._memory.store(body)
        if before is not None and essence(before.body) == essence(body):
            self._memory.settle(observed.key, action.ref, settled(action.manifest, body))
        log.info("applied object=%s child=%s why=%s", observed.key, action.ref, action.why)
        return None


def problem_of(error: ApiError, what: str) -> Problem:
    """Return what an answer of the API server means, in the closed list's words."""
    if error.status == 403 and " cannot " in error.message:
        return Problem(
            Reason.PERMISSION_DENIED,
            f"could not {what}: {error.message}. Grant the operator this permission: upgrade its Helm release",
        )
    if error.status in (0, 401, 408, 409, 429) or error.status >= 500:
        return Problem(Reason.API_UNAVAILABLE, f"could not {what}: {error.message}. It is tried again")
    return Problem(
        Reason.APPLY_REJECTED,
        f"could not {what}: {error.message}. If a template is the cause, correct it; else see the operator's log",
    )


def _verb(action: Apply | Delete) -> str:
    return "delete" if isinstance(action, Delete) else "apply"
