"""A fault at every call of a change: afterwards the cluster is as the spec says, and nothing of others was touched."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.faulty_world import CUT_TURNS, DELETES, FAULTS, Fault, FaultyWorld, Pair
from tests.support.objects import spec
from tests.support.profiles import examples

#: Turns beyond those of a run without a fault: the pass that failed, and what was hidden meanwhile.
EXTRA_TURNS = CUT_TURNS + 3
MOST_TURNS = 60
#: Each fault meets every so manieth call, each at others, so that every call meets some; all meet all with CI set.
STRIDE = examples(dev=20, ci=1)
#: More engines of a role than are wanted, as a rollout may have them unless its spec says otherwise.
SURGE = 1

Spec = dict[str, Any]
Step = Callable[[FaultyWorld], None]


def stated(prefill: Spec, decode: Spec, **changes: Any) -> Spec:
    """Return changes of the spec: fields of both roles, and others. No check of transfers: there are no pods to ask."""
    roles = {"prefill": {**spec()["prefill"], **prefill}, "decode": {**spec()["decode"], **decode}}
    return {"transferCheck": {"enabled": False}, **roles, **changes}


def sized(prefill: int, decode: int, **changes: Any) -> Spec:
    return stated({"replicas": prefill}, {"replicas": decode}, **changes)


def scaled(**changes: Any) -> Spec:
    """Return a spec that leaves the number of both roles to scalers, which begin with what runs."""
    role = {"replicas": None, "scaling": {"minReplicas": 1, "maxReplicas": 4}}
    return stated(role, role, **changes)


def grouped(**changes: Any) -> Spec:
    """Return a spec whose decode engines are groups of two pods, made anew at once when one fails."""
    multinode = {"nodeCount": 2, "restartBackoff": {"baseDelaySeconds": 1, "maxDelaySeconds": 1}}
    return stated({"replicas": 2}, {"replicas": 2, "multinode": multinode}, **changes)


TWO = sized(2, 2)
NEW, NEWER = {"image": "acme/engine:2"}, {"image": "acme/engine:3"}
SIDECAR = {"spec": {"containers": [{"name": "log", "image": "acme/log:2"}]}}


def put(**changes: Any) -> Step:
    return lambda world: world.put(**changes)


def in_turn(*steps: Step) -> Step:
    """Do one thing after another, with two turns in between: a rollout is in the middle then."""

    def step(world: FaultyWorld) -> None:
        for number, each in enumerate(steps):
            if number:
                world.turn()
                world.turn()
            each(world)

    return step


def _scale_by_scaler(world: FaultyWorld) -> None:
    for place, body in list(world.api.objects.items()):
        if place[0] == "DCPDisaggRoleScaler":
            world.api.put({**body, "spec": {"replicas": 3}})


def _made_anew(world: FaultyWorld) -> None:
    world.remove()
    world.turn()
    world.put(**TWO)


def _made_anew_beside_what_is_left(world: FaultyWorld) -> None:
    world.collector_is_behind = True
    world.remove()
    world.put(**TWO)


@dataclass(frozen=True, slots=True)
class Change:
    """What exists before, and what is done to it."""

    before: Spec
    step: Step
    #: Engines of each role that answer requests at every moment, in pairs; None where there is no such number.
    held: Pair | None
    #: The most engines of each role that are wanted before or after.
    wanted: Pair = (2, 2)


CHANGES: dict[str, Change] = {
    "an object is made": Change({}, put(**TWO), held=None),
    "a new revision": Change(TWO, put(**TWO, **NEW), held=(2, 2)),
    "a revision that is taken back": Change(TWO, in_turn(put(**TWO, **NEW), put(**TWO)), held=(2, 2)),
    "a third revision in the middle": Change(TWO, in_turn(put(**TWO, **NEW), put(**TWO, **NEWER)), held=(2, 2)),
    "a pause in the middle": Change(
        TWO, in_turn(put(**TWO, **NEW), put(**TWO, **NEW, paused=True), put(**TWO, **NEW)), held=(2, 2)
    ),
    "a new revision of unequal roles": Change(sized(3, 2), put(**sized(3, 2), **NEW), held=(3, 2), wanted=(3, 2)),
    "a sidecar": Change(TWO, put(**stated({"replicas": 2}, {"replicas": 2, "template": SIDECAR})), held=(2, 2)),
    "fewer engines": Change(TWO, put(**sized(1, 1)), held=(1, 1)),
    "more engines": Change(TWO, put(**sized(3, 3)), held=(2, 2), wanted=(3, 3)),
    "numbers are left to scalers": Change(TWO, put(**scaled()), held=(2, 2)),
    "scalers ask for more": Change(scaled(), _scale_by_scaler, held=(1, 1), wanted=(3, 3)),
    "scalers ask for more in the middle": Change(
        scaled(), in_turn(put(**scaled(**NEW)), _scale_by_scaler), held=(1, 1), wanted=(3, 3)
    ),
    "numbers are stated again": Change(scaled(), put(**TWO), held=(1, 1)),
    "groups of a new revision": Change(grouped(), put(**grouped(**NEW)), held=(2, 2)),
    "a pod of a group fails": Change(grouped(), FaultyWorld.fail_a_worker, held=None),
    "a feature is turned off": Change(TWO, put(**TWO, networkPolicy={"enabled": False}), held=(2, 2)),
    "the router is the user's": Change(TWO, put(**TWO, router={"replicas": 0}), held=(2, 2)),
    "deleted and made anew": Change(TWO, _made_anew, held=None),
    "made anew beside what is left": Change(TWO, _made_anew_beside_what_is_left, held=None),
}


@functools.cache
def at_rest(written: str) -> FaultyWorld:
    """A world in which a spec is carried out; none is changed any more."""
    world = FaultyWorld()
    if changes := json.loads(written):
        world.put(**changes)
        world.rest(MOST_TURNS)
    return world


def resting(changes: Spec) -> FaultyWorld:
    return at_rest(json.dumps(changes, sort_keys=True))


def begin(change: str) -> FaultyWorld:
    before = CHANGES[change].before
    world = FaultyWorld(like=resting(before))
    if before:
        # The operator has just started, and knows what there is after a pass.
        world.rest(MOST_TURNS)
    return world


def carry_out(change: str, at: int | None, fault: Fault | None) -> FaultyWorld:
    """Begin a change, the call with a number of which meets a fault."""
    world = begin(change)
    world.arm(at, fault, CHANGES[change].held or (1, 1))
    CHANGES[change].step(world)
    return world


@functools.cache
def reference(change: str) -> tuple[dict, int, int]:
    """The outcome of a change without a fault, in how many turns and calls."""
    world = carry_out(change, None, None)
    turns = world.rest(MOST_TURNS)
    return world.result(), turns, world.calls


def calls_of(change: str, salt: int) -> range:
    """The calls of a change that meet a fault in this run."""
    _, _, calls = reference(change)
    assert calls > 1
    stride = min(STRIDE, max(1, calls // 2))
    return range(salt % stride + 1, calls + 1, stride)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_at_any_call_the_cluster_is_as_the_spec_says(change: str, fault: str):
    expected, turns, _ = reference(change)
    for at in calls_of(change, list(FAULTS).index(fault)):
        world = carry_out(change, at, FAULTS[fault])
        world.rest(turns + EXTRA_TURNS)
        assert world.crashes == ("killed" in fault), f"call {at}"
        if CHANGES[change].held is not None:
            assert world.least_share >= 1, f"call {at}"
        most = tuple(count + SURGE for count in CHANGES[change].wanted)
        assert all(map(int.__le__, world.most_engines, most)), f"call {at}: {world.most_engines} engines asked for"
        # A spec that came and went while nothing was told has no place in the history.
        seen = without_history if "cut" in fault else dict
        assert seen(world.result()) == seen(expected), f"call {at}"
        nothing_of_others_was_touched(world, at)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("what", DELETES)
def test_an_object_that_is_deleted_at_any_call_of_a_change_leaves_nothing_behind(change: str, what: str):
    """Made anew it is as if it had been made first: nothing that the pass knew of the old one is done to it."""
    for at in calls_of(change, len(what)):
        world = carry_out(change, at, DELETES[what])
        world.collector_is_behind = False
        world.rest(MOST_TURNS)
        assert without_history(world.result()) == without_history(made_first(world)), f"call {at}"
        nothing_of_others_was_touched(world, at)


def made_first(world: FaultyWorld) -> Spec:
    """The outcome where nothing was before an object, and its scalers, if it has any, are asked for as many engines."""
    there = world.api.objects.get(("DCPDisaggDeployment", "models", "chat"))
    rests = resting(there["spec"] if there is not None else {})
    asked = {place: body["spec"] for place, body in world.api.objects.items() if place[0] == "DCPDisaggRoleScaler"}
    if all(rests.api.objects[place]["spec"] == numbers for place, numbers in asked.items()):
        return rests.result()
    fresh = FaultyWorld(like=rests)
    for place, numbers in asked.items():
        fresh.api.put({**fresh.api.objects[place], "spec": numbers})
    fresh.rest(MOST_TURNS)
    return fresh.result()


def without_history(result: Spec) -> Spec:
    """Leave out the states that the object has had: of what was made anew, or not seen, they are others."""
    return {place: body for place, body in result.items() if not place.startswith("ControllerRevision/")}


def nothing_of_others_was_touched(world: FaultyWorld, at: int) -> None:
    for body in world.foreign:
        place = (body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        assert world.api.objects[place] == body, f"call {at}"
