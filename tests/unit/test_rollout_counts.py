"""What a rollout is computed from, read from workloads and pods."""

import copy

import pytest

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.observed import Observed
from dcp_operator.rollout import rollout_state
from dcp_operator.rollout.shares import Pair
from dcp_operator.rollout.situation import Engines, Revision
from dcp_operator.target import Operator, resolve_target
from tests.support.objects import owner, pod, spec
from tests.support.simulated_api import SimulatedApi, observe

NOW = "2026-01-01T01:00:00Z"


def world(**changes) -> Observed:
    """Return an object whose workloads were made, without pods."""
    api = SimulatedApi()
    api.put(owner(**changes))
    target = resolve_target(observe(api), Operator("acme/operator:1"), "ZnJlc2g=")
    for manifest in target.manifests:
        if manifest["kind"] == "Deployment":
            api.put(copy.deepcopy(manifest))
    return observe(api)


def state(observed: Observed, pods: list[dict], *, target: str = "other", now: str = NOW):
    seen = Observed(observed.body, observed.children, tuple(pods))
    return rollout_state(seen, Spec.model_validate(observed.body["spec"]), target, now)


def made(observed: Observed) -> str:
    return next(child.revision for child in observed.workloads() if child.revision)


def seen_of(observed: Observed, pods: list[dict], now: str = NOW) -> Revision:
    return state(observed, pods, now=now).situation.revisions[0]


def unscheduled(revision: str, reason: str = "Unschedulable") -> dict:
    said = [{"type": "PodScheduled", "status": "False", "reason": reason}]
    return pod("prefill", revision, conditions=said)


def test_workloads_and_pods_become_numbers():
    observed = world(prefill={**spec()["prefill"], "replicas": 3})
    rev = made(observed)
    pods = [
        pod("prefill", rev, name="ready", ready=True),
        pod("prefill", rev, name="away", since="2026-01-01T00:59:00Z"),
        pod("prefill", rev, name="late", since="2026-01-01T00:59:30Z"),
        pod("prefill", rev, name="going", ready=True, deletionTimestamp="2026-01-01T00:59:00Z"),
        pod("decode", rev, ready=True),
        pod("router", rev, name="router", ready=True),
    ]
    found = seen_of(observed, pods)
    assert found == Revision(rev, Engines(3, ready=1, stale=1), Engines(1, ready=1), routers=1, ready_routers=1)


def test_a_pod_without_a_ready_condition_is_as_old_as_it_is():
    observed = world()
    bare = pod("decode", made(observed), creationTimestamp="2026-01-01T00:00:00Z")
    bare["status"]["conditions"] = []
    assert seen_of(observed, [bare]).decode.stale == 1
    del bare["metadata"]["creationTimestamp"]
    assert seen_of(observed, [bare]).decode.stale == 0


def test_without_a_clock_nothing_is_away_for_long():
    observed = world()
    assert seen_of(observed, [pod("decode", made(observed))], now="").decode.stale == 0


@pytest.mark.parametrize(("reason", "count"), [("Unschedulable", 1), ("SchedulingGated", 0)])
def test_engines_for_which_no_node_was_found_are_counted_and_gated_ones_are_not(reason: str, count: int):
    observed = world()
    assert seen_of(observed, [unscheduled(made(observed), reason)]).prefill.unschedulable == count


def test_a_workload_that_is_being_removed_asks_for_nothing():
    observed = world()
    for child in observed.workloads():
        if child.component == names.ROUTER:
            child.body["metadata"]["deletionTimestamp"] = NOW
        if child.component == "decode":
            child.body["metadata"]["deletionTimestamp"] = NOW
    found = seen_of(observed, [])
    assert (found.routers, found.replicas) == (None, Pair(1, 0))


def test_it_is_looked_at_again_when_an_old_engine_has_been_away_for_a_minute():
    observed = world()
    rev = made(observed)
    away = [pod("decode", rev, since="2026-01-01T00:59:45Z"), pod("prefill", rev, since="2026-01-01T00:00:00Z")]
    assert state(observed, away).look_again_s == 45
    # What the target's engines do is in their events.
    assert state(observed, away, target=rev).look_again_s is None
    assert state(observed, []).look_again_s is None


def test_what_is_wanted_is_what_autoscalers_ask_for_within_their_bounds():
    scaled = {"scaling": {"minReplicas": 1, "maxReplicas": 4}}
    observed = world(decode={**{k: v for k, v in spec()["decode"].items() if k != "replicas"}, **scaled})
    for child in observed.workloads():
        if child.component == "decode":
            child.body["spec"]["replicas"] = 9
    assert state(observed, []).situation.bounds.wanted == Pair(1, 4)
