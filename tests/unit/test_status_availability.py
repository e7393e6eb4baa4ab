"""Available, pauses and rollouts in the status: what counts for requests, and what the words are."""

import copy

import pytest

from dcp_operator.observed import Observed
from tests.support.objects import spec
from tests.unit.test_status import conditions, revision, status_of, world

ROLES = {"prefill": {**spec()["prefill"], "replicas": 4}, "decode": {**spec()["decode"], "replicas": 2}}


def with_ready(observed: Observed, **ready: int) -> Observed:
    """Return the same with so many ready pods of each component."""
    left = dict(ready)
    pods = []
    for pod in copy.deepcopy(list(observed.pods)):
        role = pod["metadata"]["labels"]["dcpdisagg.io/role"]
        is_ready = left.setdefault(role, 9) > 0
        left[role] -= 1
        pod["status"]["conditions"] = [{"type": "Ready", "status": str(is_ready)}]
        pods.append(pod)
    return Observed(observed.body, observed.children, tuple(pods))


@pytest.mark.parametrize(
    ("strategy", "ready", "status", "reason"),
    [
        ({}, {}, "True", "Serving"),
        ({}, {"prefill": 3}, "False", "CapacityBelowFloor"),
        ({"maxUnavailable": 1}, {"prefill": 3}, "True", "Serving"),
        # One of two decode engines is half of the pairs, and so may half of prefill be missing.
        ({"maxUnavailable": 1}, {"prefill": 2, "decode": 1}, "True", "Serving"),
        ({"maxUnavailable": 1}, {"prefill": 1}, "False", "CapacityBelowFloor"),
        ({"maxUnavailable": "100%"}, {"prefill": 1, "decode": 1}, "True", "Serving"),
        ({"maxUnavailable": "100%"}, {"decode": 0}, "False", "PodsPending"),
        ({"maxUnavailable": "100%"}, {"router": 0}, "False", "PodsPending"),
    ],
)
def test_requests_are_answered_by_pairs_behind_a_router_and_by_no_fewer_than_the_floor(
    strategy: dict, ready: dict[str, int], status: str, reason: str
):
    observed = with_ready(world(ready=True, rolloutStrategy=strategy, **ROLES), **ready)
    said = conditions(status_of(observed))["Available"]
    assert (said["status"], said["reason"]) == (status, reason)


def test_how_many_are_needed_is_said():
    observed = with_ready(world(ready=True, rolloutStrategy={"maxUnavailable": 1}, **ROLES), prefill=1)
    said = conditions(status_of(observed))["Available"]["message"]
    assert said == "25% of the wanted engines answer requests, in pairs; 2 prefill and 1 decode are needed"


def edited(observed: Observed, **changes) -> Observed:
    body = copy.deepcopy(observed.body)
    body["spec"] = {**body["spec"], **changes}
    body["metadata"]["generation"] += 1
    body["status"] = status_of(observed)
    return Observed(body, observed.children, observed.pods)


def test_a_change_of_the_spec_takes_ready_away_and_leaves_available():
    status = status_of(edited(world(ready=True), image="acme/engine:2"))
    said = conditions(status)
    assert (said["Ready"]["status"], said["Available"]["status"]) == ("False", "True")
    [old] = status["rollout"]["revisions"]
    assert old == {"revision": revision(world(ready=True)), "share": "100%", "prefill": 1, "decode": 1, "router": 1}


def test_one_revision_that_is_all_there_is_has_no_rollout():
    assert "rollout" not in status_of(world(ready=True))
    assert "rollout" not in status_of(world(ready=False))


def test_a_pause_that_holds_a_revision_back_is_the_reason():
    said = conditions(status_of(edited(world(ready=True), image="acme/engine:2", paused=True)))
    for kind in ("Ready", "Progressing"):
        assert (said[kind]["status"], said[kind]["reason"]) == ("False", "Paused")
        assert "dcpctl rollout resume" in said[kind]["message"]
    assert said["PrefillReady"]["status"] == said["Available"]["status"] == "True"


def test_a_pause_that_holds_nothing_back_keeps_ready():
    said = conditions(status_of(world(ready=True, paused=True)))
    assert said["Ready"]["status"] == "True"
    assert (said["Progressing"]["status"], said["Progressing"]["reason"]) == ("False", "Paused")


def test_pods_of_another_revision_that_are_not_going_keep_ready_from_being_true():
    observed = world(ready=True)
    old = copy.deepcopy(observed.pods[0])
    old["metadata"] |= {"name": "old", "labels": {**old["metadata"]["labels"], "dcpdisagg.io/revision": "00000000"}}
    left = conditions(status_of(Observed(observed.body, observed.children, (*observed.pods, old))))
    assert (left["Ready"]["status"], left["Ready"]["reason"]) == ("False", "RollingOut")
    assert "revision 00000000" in left["Ready"]["message"]
    old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    going = conditions(status_of(Observed(observed.body, observed.children, (*observed.pods, old))))
    assert going["Ready"]["status"] == "True"
