"""Roles whose scaler is missing while revisions change places: what is asked for, and that nothing runs away."""

import copy

import pytest

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.kinds import DEPLOYMENT, SCALER
from dcp_operator.observed import Observed
from dcp_operator.plan import Apply, Delete, Scale, make_plan
from dcp_operator.rollout.asked import asked_replicas, missing_scaler
from dcp_operator.settings import Role
from dcp_operator.target import Operator, Target, resolve_target
from tests.support.objects import owner, pod, spec
from tests.support.simulated_api import SimulatedApi, observe

OPERATOR = Operator("acme/operator:1")
SCALED = {"parallelism": {"tensor": 2, "decodeContext": 2}, "blockSize": 32}
DECODE = {**SCALED, "scaling": {"minReplicas": 1, "maxReplicas": 12}}
FOUR = {"prefill": {**spec()["prefill"], "replicas": 4}, "decode": DECODE}


def target_of(api: SimulatedApi) -> Target:
    return resolve_target(observe(api), OPERATOR, "ZnJlc2g=")


def take_turn(api: SimulatedApi, *, is_ready: bool = True) -> None:
    """Carry out one plan, and let every pod become ready, or no new one be made yet."""
    for action in make_plan(target_of(api), observe(api)).actions:
        match action:
            case Apply(is_new=True) if (action.ref.kind, "models", action.ref.name) in api.objects:
                pass  # The API server answers that somebody else's object has the name.
            case Apply(manifest) if action.ref.kind in (DEPLOYMENT.kind, SCALER.kind):
                api.apply({DEPLOYMENT.kind: DEPLOYMENT, SCALER.kind: SCALER}[action.ref.kind], "models", manifest)
            case Delete(ref, uid):
                api.delete(DEPLOYMENT, "models", ref.name, uid)
            case Scale(ref, uid, replicas):
                api.scale(DEPLOYMENT, "models", ref.name, uid, replicas)
            case _:
                pass  # Other children make no difference here.
    if is_ready:
        api.run_deployments()


def rolled_out(**scaler: object) -> SimulatedApi:
    """Return four engines of each role of one revision, and a change of the image that was just asked for."""
    api = SimulatedApi()
    api.put(owner(**{**FOUR, "decode": {**SCALED, "replicas": 4}}))
    take_turn(api)
    body = copy.deepcopy(api.owner())
    body["spec"] |= {"decode": DECODE, "image": "acme/engine:2"}
    api.put(body)
    if scaler:
        taken = {"kind": SCALER.kind, "apiVersion": SCALER.api_version, "spec": {"replicas": 1}}
        ours = [{"uid": api.owner()["metadata"]["uid"], "controller": True}]
        api.put(
            {**taken, "metadata": {"name": "chat-decode", "namespace": "models", "ownerReferences": ours, **scaler}}
        )
    return api


def engines(api: SimulatedApi, role: str = "decode") -> list[int]:
    found = (body for place, body in api.objects.items() if place[0] == DEPLOYMENT.kind)
    return sorted(body["spec"]["replicas"] for body in found if f"-{role}-" in body["metadata"]["name"])


OTHERS = [{"uid": "other", "controller": True}]


@pytest.mark.parametrize(
    ("scaler", "words"),
    [
        ({"ownerReferences": OTHERS}, "which is not there"),
        ({"ownerReferences": OTHERS, "labels": {names.LABEL_NAME: "chat"}}, "which is another's"),
        (
            {"labels": {names.LABEL_NAME: "chat"}, "deletionTimestamp": "2026"},
            "which is being deleted",
        ),
    ],
    ids=["its name is taken", "its name is taken by one with our labels", "a finalizer holds it"],
)
def test_nothing_moves_while_the_scaler_is_missing_and_it_is_said_why(scaler: dict, words: str):
    api = rolled_out(**scaler)
    for _ in range(8):
        take_turn(api)
    assert engines(api) == [4]
    rollout = target_of(api).rollout
    assert rollout is not None
    assert rollout.waits_for is not None
    assert words in rollout.waits_for
    assert "kubectl -n models get dcpdisaggrolescalers chat-decode" in rollout.waits_for
    api.remove(SCALER.kind, "models", "chat-decode")
    for _ in range(20):
        take_turn(api)
    assert api.objects[SCALER.kind, "models", "chat-decode"]["spec"] == {"replicas": 4}
    assert engines(api) == [4]


def test_a_scaler_that_is_deleted_while_the_new_engines_start_comes_back_without_the_surge():
    for turns in range(1, 14):
        api = rolled_out()
        for _ in range(turns):
            take_turn(api)
        take_turn(api, is_ready=False)
        api.remove(SCALER.kind, "models", "chat-decode")
        take_turn(api)
        found = api.objects[SCALER.kind, "models", "chat-decode"]["spec"]["replicas"]
        assert found == 4, f"{engines(api)} became {found}"


def seen(old: tuple[int, int], new: tuple[int, int], **strategy: object) -> tuple[Observed, Spec]:
    """Return two revisions of decode engines, each as (asked for, ready), without a scaler."""
    api = SimulatedApi()
    stated = owner(**FOUR, rolloutStrategy={"maxSurge": 1, "maxUnavailable": 0, **strategy})
    pods = []
    for number, (asked, ready) in enumerate((old, new)):
        api.put({**stated, "spec": {**stated["spec"], "image": f"acme/engine:{number}"}})
        target = target_of(api)
        for manifest in target.manifests:
            if manifest["kind"] == DEPLOYMENT.kind:
                api.put({**manifest, "spec": {**manifest["spec"], "replicas": asked}})
        name = target.revision or ""
        pods += [pod("decode", name, name=f"{name}-{n}", ready=n < ready) for n in range(asked)]
    observed = observe(api)
    return Observed(observed.body, observed.children, tuple(pods)), Spec.model_validate(observed.body["spec"])


@pytest.mark.parametrize(
    ("old", "new", "strategy", "asked"),
    [
        ((4, 4), (1, 0), {}, 4),
        ((2, 2), (2, 2), {}, 4),
        ((2, 2), (3, 2), {}, 4),
        ((4, 4), (4, 0), {"maxSurge": "100%"}, 4),
        ((2, 1), (2, 0), {}, 3),
        ((4, 0), (1, 0), {}, 4),
        ((4, 1), (2, 0), {"maxSurge": 2}, 4),
        ((3, 3), (1, 0), {"maxSurge": 0, "maxUnavailable": 1}, 4),
    ],
    ids=[
        "the surge is still starting",
        "half-way",
        "half-way with the surge",
        "the surge doubles it",
        "dead engines take away no more than the surge",
        "with all engines dead too",
        "no fewer than one revision has",
        "without a surge it is the sum",
    ],
)
def test_of_several_revisions_the_engines_that_are_ready_are_asked_for_within_what_the_surge_explains(
    old: tuple[int, int], new: tuple[int, int], strategy: dict, asked: int
):
    assert asked_replicas(*seen(old, new, **strategy))[Role.DECODE] == asked


def test_engines_that_drain_behind_routers_that_are_gone_are_not_asked_for_again():
    observed, stated = seen((4, 4), (4, 4), maxSurge="100%")
    old = observed.workloads()[0].revision
    left = {ref: child for ref, child in observed.children.items() if ref.name != f"chat-router-{old}"}
    going = Observed(observed.body, left, observed.pods)
    assert asked_replicas(going, stated)[Role.DECODE] == 4
    new = next(child.revision for child in going.workloads() if child.revision != old)
    assert missing_scaler(going, stated, new or "") is None, "its retirement goes on"
