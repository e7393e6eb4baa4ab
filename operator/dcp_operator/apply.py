"""The only writer of the cluster: carries out a plan, writes the status, records events; failures become problems."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from dcp_operator import names
from dcp_operator.api.base import API_VERSION, KIND
from dcp_operator.client import ApiError
from dcp_operator.difference import first_difference
from dcp_operator.events import EventWrites, Recorder
from dcp_operator.kinds import (
    DEPLOYMENT_OF_ENGINES,
    GIVEN_ONCE,
    NETWORK_POLICY,
    POD,
    ROLE_BINDING,
    SCALER,
    SECRET,
    SERVICE_ACCOUNT,
    WORKLOAD_KINDS,
    Kind,
    Ref,
    kind_named,
    lasting,
)
from dcp_operator.load import candidates, cost_patches, load_of
from dcp_operator.observed import Body, Child, Key, Observed, Settled, essence, section, stored_key
from dcp_operator.plan import Action, Apply, Delete, Plan, Scale, name_taken, settled, with_hash
from dcp_operator.reasons import Problem, Reason
from dcp_operator.status import said_by_others

log = logging.getLogger(__name__)

#: In so many seconds Kubernetes has made the pods of new workloads, if it has no more to do than that.
PODS_FIRST_S: Final = 0.05
#: New children are made in stages, those of a stage at once and in their order. The first is what pods need and the
#: pods themselves: as a rule, who may connect is settled before a node can have started one, and Kubernetes waits with
#: a pod whose account or Secret is not there yet. Who gives a Role away must have its rights, and the API server reads
#: them in the Role.
_FIRST, _LATER, _LAST = range(3)
_STAGES: Final = {
    **dict.fromkeys((NETWORK_POLICY.kind, SECRET.kind, SERVICE_ACCOUNT.kind, *WORKLOAD_KINDS), _FIRST),
    ROLE_BINDING.kind: _LAST,
}


class Writes(EventWrites, Protocol):
    """What of the API server's calls a plan needs; `dcp_operator.client.Api` has them."""

    def get(self, kind: Kind, namespace: str, name: str) -> Body | None:
        """Return an object, None if there is none."""
        ...

    def apply(self, kind: Kind, namespace: str, manifest: Body, subresource: str | None = None) -> Body:
        """Apply a manifest; return the object as it is then."""
        ...

    def drop_from_status(self, kind: Kind, namespace: str, name: str, uid: str, fields: Body) -> Body:
        """Take fields out of a status; return the object as it is then."""
        ...

    def make(self, kind: Kind, namespace: str, manifest: Body) -> Body:
        """Apply a manifest of an object that does not exist; return it. Raises ApiError 409 where the name is taken."""
        ...

    def create(self, kind: Kind, namespace: str, manifest: Body) -> Body:
        """Make an object that `apply` leaves alone; return it. Raises ApiError 409 where the name is taken."""
        ...

    def scale(self, kind: Kind, namespace: str, name: str, uid: str, replicas: int) -> str | None:
        """Have the workload with this uid ask for so many pods; return its version then, None if it is gone."""
        ...

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid, if it still exists."""
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
#: Reads pages of pods by their URLs, in their order; the empty text stands for one that can't be had.
Pages = Callable[[Sequence[str]], Awaitable[list[str]]]

#: Leaves the API server to others for so many seconds.
GiveWay = Callable[[float], Awaitable[None]]


class Applier:
    """Carries out decisions. Blocking calls go through `run`, the cache is touched by the caller's thread only."""

    def __init__(self, api: Writes, memory: Memory, run: Run, pages: Pages, give_way: GiveWay = asyncio.sleep) -> None:
        self._api = api
        self._memory = memory
        self._run = run
        self._recorder = Recorder(api, run)
        self._pages = pages
        self._give_way = give_way

    async def execute(self, plan: Plan, observed: Observed) -> list[Problem]:
        """Carry out a plan in its order; return what could not be done.

        One refused manifest does not keep the others from being applied. An API server that does not answer ends the
        pass: it is tried again as a whole. What is new goes at once, but for what has to wait for something.
        """
        problems = list(plan.blocked)
        await self._weigh(plan, observed)
        for batch in _batches(plan.actions):
            found = await asyncio.gather(*(self._attempt(action, observed) for action in batch))
            problems += [problem for problem in found if problem is not None]
            if any(problem is not None and problem.reason is Reason.API_UNAVAILABLE for problem in found):
                break
            if _makes_pods(batch):
                await self._give_way(PODS_FIRST_S)
        return problems

    async def _attempt(self, action: Action, observed: Observed) -> Problem | None:
        try:
            return await self._carry_out(action, observed)
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
            return problem

    async def _weigh(self, plan: Plan, observed: Observed) -> None:
        """Have the least loaded engines go first where a plan makes a workload smaller. Never keeps it from that."""
        shrinking = [(action.ref, _replicas(action)) for action in plan.actions]
        engines = [
            engine
            for ref, replicas in shrinking
            if replicas is not None
            for engine in candidates(observed, ref, replicas)
        ]
        if not engines:
            return
        pages = await self._pages([engine.url for engine in engines])
        loads = {engine.name: load_of(page) for engine, page in zip(engines, pages, strict=True)}
        unknown = sorted(name for name, load in loads.items() if load is None)
        if unknown:
            log.info("load unknown object=%s pods=%s", observed.key, ",".join(unknown))
        for patch in cost_patches(engines, loads):
            try:
                self._memory.store(await self._run(self._api.apply, POD, observed.key.namespace, patch))
            except ApiError as error:
                # The pod may be gone, or another has its name. Which pod goes is not worth waiting for.
                log.info("cost not set object=%s pod=%s error=%s", observed.key, patch["metadata"]["name"], error)
                if error.status in (0, 429) or error.status >= 500:
                    # Nor is an API server that has no time for it: each of many pods would wait for its time-out.
                    break

    async def write_status(self, observed: Observed, status: Body) -> Problem | None:
        """Write the status of exactly this object, not of a later one with its name."""
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": observed.key.name, "namespace": observed.key.namespace, "uid": observed.uid},
            "status": status,
        }
        where = (DEPLOYMENT_OF_ENGINES, observed.key.namespace, observed.key.name, observed.uid)
        try:
            body = await self._run(self._api.apply, DEPLOYMENT_OF_ENGINES, observed.key.namespace, manifest, "status")
            foreign = said_by_others(status, section(body, "status"))
            if foreign:
                # Applying leaves what others own; what we don't say must not be said.
                body = await self._run(self._api.drop_from_status, *where, foreign)
        except ApiError as error:
            if await self._is_gone(error, *where):
                return None
            log.warning("status not written object=%s error=%s", observed.key, error)
            return problem_of(error, "write the status")
        self._memory.store(body)
        return None

    async def write_scaler_status(self, observed: Observed, scaler: Child, status: Body) -> Problem | None:
        """Write the status of exactly this scaler, and nothing of what autoscalers own in it."""
        manifest = {
            "apiVersion": SCALER.api_version,
            "kind": SCALER.kind,
            "metadata": {"name": scaler.ref.name, "namespace": observed.key.namespace, "uid": scaler.uid},
            "status": status,
        }
        try:
            body = await self._run(self._api.apply, SCALER, observed.key.namespace, manifest, "status")
        except ApiError as error:
            if await self._is_gone(error, SCALER, observed.key.namespace, scaler.ref.name, scaler.uid):
                return None
            log.warning("status not written object=%s child=%s error=%s", observed.key, scaler.ref, error)
            return problem_of(error, f"write the status of {scaler.ref}")
        self._memory.store(body)
        return None

    async def _is_gone(self, error: ApiError, kind: Kind, namespace: str, name: str, uid: str) -> bool:
        """Whether a write was refused because its object is gone, or another has its name by now.

        The API server says so by 409 or 422, in words that differ, and by 409 also where two wrote at once: so it is
        asked who has the name. Where it does not tell, the write is one that failed.
        """
        if error.status not in (409, 422):
            return error.status == 404
        try:
            return await self._is_another(kind, namespace, name, uid)
        except ApiError:
            return False

    async def _is_another(self, kind: Kind, namespace: str, name: str, uid: str) -> bool:
        """Whether nothing, or another object, has a name by now. Raises ApiError."""
        found = await self._run(self._api.get, kind, namespace, name)
        return found is None or found["metadata"].get("uid") != uid

    async def record(self, observed: Observed, reason: str, message: str, *, is_warning: bool, now: str) -> None:
        """Record an event about the object; one that repeats an earlier one is counted."""
        await self._recorder.record(observed, reason, message, is_warning=is_warning, now=now)

    async def _carry_out(self, action: Action, observed: Observed) -> Problem | None:
        kind, namespace = kind_named(action.ref.kind), observed.key.namespace
        if isinstance(action, Delete):
            if action.is_left_over and await self._is_another(
                DEPLOYMENT_OF_ENGINES, namespace, observed.key.name, observed.uid
            ):
                # Not left over, but made for an object that is not seen yet.
                return None
            await self._run(self._api.delete, kind, namespace, action.ref.name, action.uid)
            log.info("deleted object=%s child=%s why=%s", observed.key, action.ref, action.why)
            return None
        before = observed.children.get(action.ref)
        if isinstance(action, Scale):
            version = await self._run(self._api.scale, kind, namespace, action.ref.name, action.uid, action.replicas)
            if before is not None and version is not None:
                # The answer is not the workload itself; what is known of it, with what changed, is.
                self._memory.store(_scaled(before.body, action.replicas, version))
            log.info(
                "scaled object=%s child=%s replicas=%d why=%s", observed.key, action.ref, action.replicas, action.why
            )
            return None
        manifest, write = action.manifest, self._api.apply
        if action.is_new:
            found = await self._make(kind, namespace, action)
            if found is None:
                log.info("applied object=%s child=%s why=%s", observed.key, action.ref, action.why)
                return None
            before = Child(found)
            if not before.belongs_to(observed.uid):
                return name_taken(before, observed)
            if before.is_deleting:
                return None
            # Ours and not seen yet, or without its label, by which it would be seen.
            manifest = _with_the_key_of(found, lasting(manifest))
            if first_difference(manifest, found) is None:
                self._memory.store(found)
                return None
        body = await self._run(write, kind, namespace, manifest)
        self._memory.store(body)
        if before is not None and essence(before.body) == essence(body):
            self._memory.settle(observed.key, action.ref, settled(action.manifest, body))
        log.info("applied object=%s child=%s why=%s", observed.key, action.ref, action.why)
        return None

    async def _make(self, kind: Kind, namespace: str, action: Apply) -> Body | None:
        """Make an object that was not seen; return what has its name already, None if it was made."""
        make = self._api.create if action.ref.kind in GIVEN_ONCE else self._api.make
        try:
            self._memory.store(await self._run(make, kind, namespace, action.manifest))
        except ApiError as error:
            if error.status != 409:
                raise
            found = await self._run(self._api.get, kind, namespace, action.ref.name)
            if found is None:
                raise
            return found
        return None


def _with_the_key_of(found: Body, manifest: Body) -> Body:
    """Return the manifest of a Secret with the control channel's key that is in use; any other as it is.

    A new key would be refused by the engines that run.
    """
    key = stored_key(found) if found["kind"] == SECRET.kind else None
    return manifest if key is None else with_hash({**manifest, "data": {names.SECRET_KEY: key}})


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


def _batches(actions: Iterable[Action]) -> Iterable[list[Action]]:
    """Return actions in their order, those together that need not wait for one another.

    Of what is new, pods come before what they don't need: while a hundred objects are made at once, they are what users
    wait for.
    """

    def is_new(action: Action) -> bool:
        return isinstance(action, Apply) and action.is_new

    def stage(action: Action) -> int:
        return _STAGES.get(action.ref.kind, _LATER)

    for new, run in itertools.groupby(actions, is_new):
        if new:
            yield from (list(batch) for _, batch in itertools.groupby(sorted(run, key=stage), stage))
        else:
            yield from ([action] for action in run)


def _makes_pods(actions: Iterable[Action]) -> bool:
    """Whether a new workload is among actions."""
    return any(isinstance(each, Apply) and each.is_new and each.ref.kind in WORKLOAD_KINDS for each in actions)


def _replicas(action: Action) -> int | None:
    """Return how many pods a workload has after an action, None where that is not what it changes."""
    match action:
        case Apply():
            return section(action.manifest, "spec").get("replicas")
        case Scale():
            return action.replicas
        case Delete():
            return None


def _scaled(body: Body, replicas: int, version: str) -> Body:
    metadata = {**body["metadata"], "resourceVersion": version}
    return {**body, "metadata": metadata, "spec": {**body["spec"], "replicas": replicas}}


def _verb(action: Action) -> str:
    return {Apply: "apply", Scale: "scale", Delete: "delete"}[type(action)]
