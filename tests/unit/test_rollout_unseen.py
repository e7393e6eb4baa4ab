"""A workload that can't be seen is not taken for one that isn't there: nothing of what may serve goes because of it."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from dcp_operator import names
from dcp_operator.kinds import LEADER_WORKER_SET, WORKLOAD_KINDS, Ref
from dcp_operator.observed import Child, Observed
from dcp_operator.plan import Apply, Delete, Plan, Scale, make_plan
from dcp_operator.reasons import Problem, Reason
from dcp_operator.target import Operator, Target, resolve_target
from tests.support.objects import owner, pod, spec
from tests.support.simulated_api import SimulatedApi, observe

OPERATOR = Operator("acme/operator:1")
WHY = "the operator may not work with leaderworkersets"
NOW = "2026-01-01T01:00:00Z"
WIDE = {**spec()["decode"], "multinode": {"nodeCount": 2}}


def target_of(observed: Observed) -> Target:
    return resolve_target(observed, OPERATOR, "ZnJlc2g=", NOW)


class World:
    """An object whose first revision, with decode in groups, serves; its LeaderWorkerSet is not in what is observed."""

    def __init__(self, **changes: Any) -> None:
        self.api = SimulatedApi()
        self.api.put(owner(decode=WIDE, **changes))
        seen = observe(self.api)
        target = target_of(seen)
        assert target.revision is not None
        self.revision, self.groups = target.revision, []
        for manifest in target.manifests:
            stored = self.api.put(copy.deepcopy(manifest))
            if manifest["kind"] == LEADER_WORKER_SET.kind:
                self.groups.append(Child(stored))
        group = {names.LABEL_GROUP_SET: self.groups[0].ref.name, names.LABEL_GROUP_INDEX: "0"}
        leader = pod("decode", self.revision, ready=True)
        leader["metadata"]["labels"] |= {**group, names.LABEL_WORKER_INDEX: "0"}
        self.pods = (
            pod("prefill", self.revision, ready=True),
            leader,
            pod("router", self.revision, name="router", ready=True),
        )

    def change(self, **changes: Any) -> None:
        self.api.put({**copy.deepcopy(self.api.owner()), "spec": spec(**changes)})

    def observed(self, *, kept: bool = False) -> Observed:
        seen = observe(self.api)
        children = {**seen.children, **({child.ref: child for child in self.groups} if kept else {})}
        return replace(seen, children=children, pods=self.pods, unavailable={LEADER_WORKER_SET.kind: WHY})

    def plan(self, *, kept: bool = False) -> tuple[Plan, Target]:
        observed = self.observed(kept=kept)
        target = target_of(observed)
        return make_plan(target, observed, NOW), target


def touches_workloads(plan: Plan) -> list[Apply | Scale | Delete]:
    return [action for action in plan.actions if action.ref.kind in WORKLOAD_KINDS]


@pytest.mark.parametrize("kept", [False, True], ids=["gone from the cache", "kept in the cache"])
@pytest.mark.parametrize("decode", [WIDE, spec()["decode"]], ids=["still asked for", "no longer asked for"])
def test_no_workload_is_touched_while_those_of_a_revision_can_not_be_seen(decode: dict[str, Any], kept: bool):
    world = World()
    world.change(decode=decode, image="acme/engine:2")
    plan, target = world.plan(kept=kept)
    assert target.revision != world.revision
    assert touches_workloads(plan) == []
    assert target.rollout is not None
    assert target.rollout.is_paused
    assert target.rollout.retired == {}
    assert target.rollout.waits_for == WHY
    assert plan.blocked == (Problem(Reason.GROUPS_UNAVAILABLE, WHY),)


def test_of_two_revisions_neither_gets_anything_of_the_other():
    world = World(prefill={**spec()["prefill"], "replicas": 2}, router={"replicas": 3})
    world.change(decode=WIDE, image="acme/engine:2", prefill={**spec()["prefill"], "replicas": 2})
    for manifest in target_of(world.observed(kept=True)).manifests:
        if manifest["kind"] == "Deployment":
            body = copy.deepcopy(manifest)
            body["spec"]["replicas"] = 1
            world.api.put(body)
    plan, _ = world.plan()
    assert touches_workloads(plan) == []


def test_what_else_a_serving_revision_lacks_is_made_again():
    world = World()
    gone = Ref("Deployment", names.workload("chat", "prefill", world.revision))
    world.api.remove(gone.kind, "models", gone.name)
    plan, _ = world.plan()
    (again,) = touches_workloads(plan)
    assert isinstance(again, Apply)
    assert (again.ref, again.why, again.manifest["spec"]["replicas"]) == (gone, "missing", 1)


def test_a_router_that_a_begun_revision_lacks_is_one_of_ours():
    world = World()
    world.change(decode=WIDE, image="acme/engine:2")
    router = names.workload("chat", "router", str(target_of(world.observed()).revision))
    for manifest in target_of(world.observed()).manifests:
        if "-prefill-" in manifest["metadata"]["name"] and manifest["kind"] == "Deployment":
            world.api.put(copy.deepcopy(manifest))
    plan, _ = world.plan()
    (made,) = touches_workloads(plan)
    assert isinstance(made, Apply)
    # Asking for none would say that the user has one.
    assert (made.ref.name, made.manifest["spec"]["replicas"]) == (router, 1)


def test_an_object_that_has_no_such_workload_and_wants_none_is_not_held():
    api = SimulatedApi()
    api.put(owner())
    for manifest in target_of(observe(api)).manifests:
        api.put(copy.deepcopy(manifest))
    api.put({**copy.deepcopy(api.owner()), "spec": spec(image="acme/engine:2")})
    observed = replace(observe(api), unavailable={LEADER_WORKER_SET.kind: WHY})
    target = target_of(observed)
    assert target.rollout is not None
    assert not target.rollout.is_paused
    assert make_plan(target, observed, NOW).blocked == ()
