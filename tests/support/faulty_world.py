"""An operator and a simulated cluster that take turns, where one chosen call to the API server goes wrong.

Calls are made one after another, so the number of a call names the same moment in every run, and a run without a fault
says how many there are.
"""

import asyncio
import copy
import functools
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from dcp_operator import names
from dcp_operator.client import ApiError
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, POD, SECRET, SERVICE
from dcp_operator.observed import Key
from dcp_operator.reconciler import Reconciler
from dcp_operator.status import ready_condition
from dcp_operator.target import Operator
from tests.support.calls_in_turn import CallsInTurn
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi, observe

Body = dict[str, Any]
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


class FaultyWorld:
    """Take turns with `turn`; the fault happens at call number `at` from the moment of `arm` on."""

    def __init__(self) -> None:
        self.api = SimulatedApi()
        self.calls = 0
        self.blind_turns = 0
        self.wall_s = self.steady_s = 0.0
        self.crashes = 0
        #: Ready pairs of a prefill and a decode engine of one revision, the fewest at any turn.
        self.fewest_pairs = 0
        self._at: int | None = None
        self._fault: Fault | None = None
        self.foreign = [copy.deepcopy(self.api.put(body)) for body in _somebody_elses()]
        self.restart()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.api, name)
        return functools.partial(self._call, real) if name in _CALLS else real

    def _call(self, real: Callable[..., Any], *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self._at and self._fault is not None:
            return self._fault(self, functools.partial(real, *arguments))
        return real(*arguments)

    def arm(self, at: int | None, fault: Fault | None) -> None:
        """Have a call go wrong; calls are counted from now on, and so is the fewest ready pairs of engines."""
        self.calls, self._at, self._fault = 0, at, fault
        self.fewest_pairs = self._pairs()

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
        """Delete the object; Kubernetes deletes what it owns."""
        self.api.remove(DEPLOYMENT_OF_ENGINES.kind, CHAT.namespace, CHAT.name)

    def turn(self) -> None:
        """Let Kubernetes do its part, tell the operator, and let it make a pass."""
        self.wall_s, self.steady_s = self.wall_s + _TURN_S, self.steady_s + _TURN_S
        self.api.run_deployments()
        self.fewest_pairs = min(self.fewest_pairs, self._pairs())
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
            observe(self.api, cache=self.operator._cache)
        else:
            for body in self.operator._cache._held.get(CHAT, {}).copy().values():
                self.operator._cache.drop(body)

    def rest(self, turns: int) -> int:
        """Take turns until one writes nothing and nothing is hidden; return how many it took. No more than `turns`."""
        for number in range(1, turns + 1):
            before = len(self.api.writes), self.crashes
            self.turn()
            if (len(self.api.writes), self.crashes) == before and not self.blind_turns and self._says_all():
                return number
        raise AssertionError(f"not at rest after {turns} turns: {self.api.writes[-5:]}")

    def _says_all(self) -> bool:
        found = self.api.objects.get((DEPLOYMENT_OF_ENGINES.kind, *CHAT))
        return found is None or ready_condition(found.get("status", {})).get("status") == "True"

    def result(self) -> dict[str, Body]:
        """Return what the cluster holds for the object, without what differs from run to run."""
        kept = {place: body for place, body in self.api.objects.items() if place[0] != POD.kind}
        return {"/".join(place): _lasting(body) for place, body in sorted(kept.items())}

    def _pairs(self) -> int:
        ready = Counter(
            (body["metadata"]["labels"].get(names.LABEL_REVISION), body["metadata"]["labels"].get(names.LABEL_ROLE))
            for place, body in self.api.objects.items()
            if place[0] == POD.kind and body["status"]["conditions"][0]["status"] == "True"
        )
        revisions = {revision for revision, _ in ready}
        return sum(min(ready[revision, role] for role in ("prefill", "decode")) for revision in revisions)


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
    """Return a body without uids, versions and times."""
    if isinstance(body, dict):
        dropped = ("uid", "resourceVersion", "creationTimestamp", "generation", "observedGeneration")
        times = ("lastTransitionTime", "lastUpdateTime", "time", "since")
        return {key: _lasting(value) for key, value in body.items() if key not in (*dropped, *times)}
    return [_lasting(element) for element in body] if isinstance(body, list) else body
