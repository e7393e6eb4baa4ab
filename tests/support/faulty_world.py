"""An operator and a simulated cluster that take turns, where one chosen call to the API server goes wrong.

Calls are made one after another, so the number of a call names the same moment in every run, and a run without a fault
says how many there are. What a rollout may not do is looked at after every call and every turn.
"""

import asyncio
import copy
import functools
import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from dcp_operator import names
from dcp_operator.client import ApiError
from dcp_operator.gather import WATCHED_KINDS
from dcp_operator.kinds import DEPLOYMENT, DEPLOYMENT_OF_ENGINES, LEADER_WORKER_SET, POD, SECRET, SERVICE
from dcp_operator.observed import Key
from dcp_operator.reconciler import Reconciler
from dcp_operator.status import ready_condition
from dcp_operator.target import Operator
from tests.support.calls_in_turn import CallsInTurn
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi
from tests.support.simulated_groups import run_groups

Body = dict[str, Any]
#: Engines of prefill and of decode.
Pair = tuple[int, int]
ROLES = ("prefill", "decode")
CHAT = Key("models", "chat")
_EPOCH = datetime(2026, 6, 1, tzinfo=UTC)
_DAY_S = 86400.0
_TURN_S = 2.0
#: Turns for which a watch that was cut tells nothing.
CUT_TURNS = 3
#: What of the API server's calls can go wrong.
_CALLS = frozenset(
    {
        "get",
        "apply",
        "make",
        "create",
        "scale",
        "delete",
        "delete_with_dependents",
        "annotate",
        "drop_from_status",
        "create_event",
        "repeat_event",
    }
)


#: Hash of what a child was made from, its owner's uid with it. What the child says is compared as it is.
_OF_UIDS = (names.ANNOTATION_DESIRED,)


class Crash(BaseException):
    """The operator's process is gone. Not an Exception: nothing in the operator may survive it."""


Fault = Callable[["FaultyWorld", Callable[[], Any]], Any]


def _refused(status: int, reason: str) -> Fault:
    def fault(world: "FaultyWorld", call: Callable[[], Any]) -> Any:
        raise ApiError(status, reason, f"told to answer {status}")

    return fault


def _lost(*, done: bool) -> Fault:
    def fault(world: "FaultyWorld", call: Callable[[], Any]) -> Any:
        if done:
            call()
        raise ApiError(0, "Unreachable", "no answer in time")

    return fault


def _crash(*, done: bool) -> Fault:
    def fault(world: "FaultyWorld", call: Callable[[], Any]) -> Any:
        if done:
            call()
        raise Crash

    return fault


def _cut(world: "FaultyWorld", call: Callable[[], Any]) -> Any:
    world.blind_turns = CUT_TURNS
    return call()


def _jump(seconds: float) -> Fault:
    def fault(world: "FaultyWorld", call: Callable[[], Any]) -> Any:
        world.wall_s += seconds
        return call()

    return fault


FAULTS: dict[str, Fault] = {
    "a conflict": _refused(409, "Conflict"),
    "too many requests": _refused(429, "TooManyRequests"),
    "an internal error": _refused(500, "InternalError"),
    "no answer to what was not done": _lost(done=False),
    "no answer to what was done": _lost(done=True),
    "the controller is killed before it": _crash(done=False),
    "the controller is killed after it": _crash(done=True),
    "the watches are cut": _cut,
    "the clock jumps a day ahead": _jump(_DAY_S),
    "the clock jumps a day back": _jump(-_DAY_S),
}


def _removed(world: "FaultyWorld", call: Callable[[], Any]) -> Any:
    world.remove()
    return call()


def _made_anew(world: "FaultyWorld", call: Callable[[], Any]) -> Any:
    body = world.api.owner()
    world.remove()
    world.api.put({**body, "metadata": {"name": CHAT.name, "namespace": CHAT.namespace}, "status": {}})
    return call()


#: What users do while a call is on its way: afterwards the cluster is as after a delete, or a delete and an apply.
DELETES: dict[str, Fault] = {"deleted": _removed, "deleted and made anew": _made_anew}


class FaultyWorld:
    """Take turns with `turn`; the fault happens at call number `at` from the moment of `arm` on."""

    def __init__(self, like: "FaultyWorld | None" = None) -> None:
        """Make a world with nothing of ours in it, or one whose cluster and clock are `like` another's."""
        self.api = SimulatedApi() if like is None else copy.deepcopy(like.api)
        self.calls = 0
        self.blind_turns = 0
        self.wall_s = self.steady_s = 0.0 if like is None else like.wall_s
        self.crashes = 0
        #: Engines that shares are of; the least share that was answered, and the most engines of a role asked for.
        self.engines: Pair = (1, 1)
        self.least_share = Fraction(0)
        self.most_engines: Pair = (0, 0)
        #: Kubernetes' collector of garbage has missed the end of the object, and removes nothing.
        self.collector_is_behind = False
        self._copies: dict[tuple[str, str, str], tuple[str, Body]] = {}
        self._at: int | None = None
        self._fault: Fault | None = None
        self.foreign = (
            [copy.deepcopy(self.api.put(body)) for body in _somebody_elses()] if like is None else like.foreign
        )
        self.restart()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.api, name)
        return functools.partial(self._call, real) if name in _CALLS else real

    def _call(self, real: Callable[..., Any], *arguments: Any) -> Any:
        self.calls += 1
        try:
            if self.calls == self._at and self._fault is not None:
                return self._fault(self, functools.partial(real, *arguments))
            return real(*arguments)
        finally:
            self._look()

    def arm(self, at: int | None, fault: Fault | None, engines: Pair = (1, 1)) -> None:
        """Have a call go wrong; calls are counted from now on, and shares are of so many engines of each role."""
        self.calls, self._at, self._fault, self.engines = 0, at, fault, engines
        self.least_share, self.most_engines = self._share(), self._asked()

    def restart(self) -> None:
        """Start the operator anew; it knows nothing yet."""
        if hasattr(self, "operator"):
            self.operator._calls.close()
        self.operator = Reconciler(
            self,  # type: ignore[arg-type] - it has the simulated server's calls
            Operator("acme/operator:1"),
            now=lambda: f"{_EPOCH + timedelta(seconds=self.wall_s):%Y-%m-%dT%H:%M:%SZ}",
            fresh_key=lambda: "ZnJlc2g=",
            calls=CallsInTurn(),
        )
        self.operator._reporter._clock = lambda: self.steady_s

    def put(self, **changes: Any) -> None:
        """Create or edit the object."""
        known = self.api.objects.get((DEPLOYMENT_OF_ENGINES.kind, CHAT.namespace, CHAT.name))
        self.api.put(owner(**changes) if known is None else {**copy.deepcopy(known), "spec": spec(**changes)})

    def remove(self) -> None:
        """Delete the object; Kubernetes deletes what it owns, unless its collector of garbage is behind."""
        place = (DEPLOYMENT_OF_ENGINES.kind, CHAT.namespace, CHAT.name)
        if not self.collector_is_behind:
            self.api.remove(*place)
        for known in (self.api.objects, self.api.applied, self.api.stated):
            known.pop(place, None)

    def fail_a_worker(self) -> None:
        """Have a pod of a group that isn't its leader end for good."""
        place, pod = next(
            (place, body)
            for place, body in sorted(self.api.objects.items())
            if place[0] == POD.kind and body["metadata"]["labels"].get(names.LABEL_WORKER_INDEX) == "1"
        )
        ended = {"phase": "Failed", "conditions": [{"type": "Ready", "status": "False"}]}
        self.api.put({**copy.deepcopy(pod), "status": ended})
        assert self.api.objects[place]["status"] == ended

    def turn(self) -> None:
        """Let Kubernetes do its part, tell the operator, and let it make a pass."""
        self.wall_s, self.steady_s = self.wall_s + _TURN_S, self.steady_s + _TURN_S
        self._collect()
        run_groups(self.api)
        self.api.run_deployments()
        self._look()
        self.blind_turns = max(0, self.blind_turns - 1)
        try:
            asyncio.run(self._pass())
        except Crash:
            self.crashes += 1
            self.restart()

    async def _pass(self) -> None:
        if not self.blind_turns:
            self._deliver()
        await self.operator.reconcile(CHAT)

    def _deliver(self) -> None:
        if (DEPLOYMENT_OF_ENGINES.kind, *CHAT) in self.api.objects:
            listed: dict[str, list[Body]] = {}
            for place, body in self.api.objects.items():
                listed.setdefault(place[0], []).append(self._told(place, body))
            for kind in (*WATCHED_KINDS, LEADER_WORKER_SET):
                version = str(next(self.api._versions))
                self.operator._cache.correct(kind, listed.get(kind.kind, ()), version, None)
        else:
            for body in self.operator._cache._held.get(CHAT, {}).copy().values():
                self.operator._cache.drop(body)

    def _told(self, place: tuple[str, str, str], body: Body) -> Body:
        """Return a copy of a body, the same as long as its version is."""
        version, copied = self._copies.get(place, ("", {}))
        if version != body["metadata"]["resourceVersion"]:
            version, copied = body["metadata"]["resourceVersion"], copy.deepcopy(body)
            self._copies[place] = version, copied
        return copied

    def rest(self, turns: int) -> int:
        """Take turns until one writes nothing and nothing is hidden; return how many it took. No more than `turns`."""
        for number in range(1, turns + 1):
            before = len(self.api.writes), self.crashes
            self.turn()
            if (len(self.api.writes), self.crashes) == before and not self.blind_turns and self._says_all():
                return number
        raise AssertionError(f"not at rest after {turns} turns: {self.api.writes[-5:]}")

    def _says_all(self) -> bool:
        """Whether the object is gone, or Ready by the word of its present spec: a pass that fails writes nothing."""
        found = self.api.objects.get((DEPLOYMENT_OF_ENGINES.kind, *CHAT))
        if found is None:
            return True
        status, generation = found.get("status", {}), found["metadata"]["generation"]
        return status.get("observedGeneration") == generation and ready_condition(status).get("status") == "True"

    def result(self) -> dict[str, Body]:
        """Return what the cluster holds for the object, without what differs from run to run."""
        kept = {place: body for place, body in self.api.objects.items() if place[0] != POD.kind}
        return {"/".join(place): _lasting(body) for place, body in sorted(kept.items())}

    def _collect(self) -> None:
        """Remove what belongs to an object that is gone, as Kubernetes' collector of garbage does."""
        if self.collector_is_behind:
            return
        uids = {body["metadata"]["uid"] for body in self.api.objects.values()}
        for place, body in list(self.api.objects.items()):
            owners = body["metadata"].get("ownerReferences", [])
            if owners and not any(each["uid"] in uids for each in owners):
                self.api.remove(*place)

    def _look(self) -> None:
        self.least_share = min(self.least_share, self._share())
        self.most_engines = tuple(map(max, self.most_engines, self._asked()))

    def _workloads(self) -> list[Body]:
        kinds = (DEPLOYMENT.kind, LEADER_WORKER_SET.kind)
        return [body for place, body in self.api.objects.items() if place[0] in kinds and body["metadata"]["labels"]]

    def _asked(self) -> Pair:
        """Return the engines of each role that the workloads of all revisions ask for."""
        asked: Counter[str] = Counter()
        for workload in self._workloads():
            asked[workload["metadata"]["labels"][names.LABEL_ROLE]] += workload["spec"]["replicas"]
        return asked["prefill"], asked["decode"]

    def _share(self) -> Fraction:
        """Return the part of the wanted engines that answers requests, in pairs of one revision with a router.

        Of ready pods those count that are asked for: the others go when Kubernetes acts next.
        """
        ready: Counter[str] = Counter()
        for place, pod in self.api.objects.items():
            if place[0] == POD.kind and pod["status"]["conditions"][0]["status"] == "True":
                ready[pod["metadata"]["ownerReferences"][0]["uid"]] += 1
        counts: dict[str, dict[str, int]] = {}
        for workload in self._workloads():
            metadata = workload["metadata"]
            there = min(ready[metadata["uid"]], workload["spec"]["replicas"])
            role = metadata["labels"][names.LABEL_ROLE]
            counts.setdefault(_revision_of(workload), {})[role] = there
        owner = self.api.objects.get((DEPLOYMENT_OF_ENGINES.kind, *CHAT), {"spec": {}})
        brings_router = owner["spec"].get("router", {}).get("replicas") == 0
        served = [
            min(Fraction(each.get(role, 0), wanted) for role, wanted in zip(ROLES, self.engines, strict=True))
            for each in counts.values()
            if brings_router or each.get(names.ROUTER, 0)
        ]
        return sum(served, Fraction(0))


def _revision_of(workload: Body) -> str:
    labels = workload["metadata"]["labels"]
    return labels.get(names.LABEL_REVISION) or workload["spec"]["template"]["metadata"]["labels"][names.LABEL_REVISION]


def _somebody_elses() -> list[Body]:
    """Return objects beside the operator's: one that only has the label, and one with the name of another's child."""
    labels = {names.LABEL_NAME: CHAT.name}
    return [
        {
            "kind": SERVICE.kind,
            "metadata": {"name": "theirs", "namespace": CHAT.namespace, "labels": labels},
            "spec": {},
        },
        {"kind": SECRET.kind, "metadata": {"name": "other-kv", "namespace": CHAT.namespace}, "data": {"key": "eA=="}},
    ]


def _lasting(body: Body) -> Body:
    """Return a body without uids, and hashes of them, versions and times; of groups that were made anew which."""
    if isinstance(body, dict):
        remembered = body.get(names.ANNOTATION_GROUP_RESTARTS)
        if remembered is not None:
            body = {**body, names.ANNOTATION_GROUP_RESTARTS: sorted(json.loads(remembered))}
        dropped = ("uid", "resourceVersion", "creationTimestamp", "generation", "observedGeneration", *_OF_UIDS)
        times = ("lastTransitionTime", "lastUpdateTime", "time", "since")
        return {key: _lasting(value) for key, value in body.items() if key not in (*dropped, *times)}
    return [_lasting(element) for element in body] if isinstance(body, list) else body
