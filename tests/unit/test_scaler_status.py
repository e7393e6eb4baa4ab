"""What the scalers of an object say."""

import copy
from dataclasses import replace

import pytest

from dcp_operator import names
from dcp_operator.build import Context
from dcp_operator.build.scaler import build_scaler
from dcp_operator.kinds import ref_of
from dcp_operator.observed import Child, Observed
from dcp_operator.scaler_status import changed_scalers, pod_selector
from dcp_operator.settings import Role
from dcp_operator.status import make_status, ready_condition
from dcp_operator.target import Operator, resolve_target
from tests.support.objects import owner, pod
from tests.support.objects import spec as object_spec
from tests.support.specimens import loaded

NOW = "2026-01-02T00:00:00Z"
BEFORE = "2026-01-01T00:00:00Z"


def parts(decode: dict, **changes):
    fields = {**object_spec()["decode"], "replicas": None, "scaling": {"minReplicas": 1, "maxReplicas": 4}, **decode}
    body = owner(decode=fields, **changes)
    return loaded({"spec": body["spec"]}).spec, body


def observed_with(asked: int, status: dict | None = None, *, pods: int = 2, decode: dict | None = None, **changes):
    spec, body = parts(decode or {}, **changes)
    manifest = build_scaler(Context("chat", "models", spec, "-", uid=body["metadata"]["uid"]), Role.DECODE)
    assert manifest is not None
    scaler = copy.deepcopy(manifest)
    scaler["metadata"] |= {"uid": "s-1", "generation": 3}
    scaler["spec"] = {"replicas": asked}
    if status is not None:
        scaler["status"] = status
    child = Child(scaler)
    engines = tuple(pod("decode", f"r{number}", ready=True) for number in range(pods))
    return Observed(body=body, children={child.ref: child}, pods=engines), spec


def said(asked: int, **changes):
    ((_, status),) = changed_scalers(*observed_with(asked, **changes), NOW)
    (condition,) = status["conditions"]
    return status, (condition["status"], condition["reason"], condition["message"])


CASES = {
    "within": (3, {}, ("False", "Within", "3 asked for, and as many wanted")),
    "below": (0, {}, ("True", "ClampedToMin", "0 asked for, 1 run: spec.decode.scaling.minReplicas is 1")),
    "above": (9, {}, ("True", "ClampedToMax", "9 asked for, 4 run: spec.decode.scaling.maxReplicas is 4")),
    "ratio": (
        4,
        {"ratio": {"min": "1:2"}},
        ("True", "HeldByRatio", "4 asked for, lowered to 2: spec.ratio.min is 1:2 beside 1 prefill"),
    ),
}


@pytest.mark.parametrize(("asked", "changes", "words"), CASES.values(), ids=CASES.keys())
def test_a_scaler_says_what_became_of_its_number_and_why(asked, changes, words):
    assert said(asked, **changes)[1] == words


def test_it_counts_the_engines_of_all_revisions():
    status, _ = said(2, pods=3)
    assert status["replicas"] == 3
    assert status["selector"] == "dcpdisagg.io/name=chat,dcpdisagg.io/role=decode"


def test_of_a_group_only_the_leader_is_selected():
    selected = dict(pair.split("=") for pair in pod_selector("chat", Role.DECODE).split(","))
    assert selected[names.LABEL_ROLE] != names.worker_component(Role.DECODE)


def test_nothing_is_written_while_nothing_changes():
    observed, spec = observed_with(3)
    ((_, status),) = changed_scalers(observed, spec, NOW)
    assert changed_scalers(observed_with(3, status)[0], spec, "2027-01-01T00:00:00Z") == []


def test_a_condition_keeps_the_time_since_when_it_has_its_status():
    observed, spec = observed_with(3)
    ((_, first),) = changed_scalers(observed, spec, BEFORE)
    ((_, same),) = changed_scalers(observed_with(2, first)[0], spec, NOW)
    ((_, other),) = changed_scalers(observed_with(9, first)[0], spec, NOW)
    assert same["conditions"][0]["lastTransitionTime"] == BEFORE
    assert other["conditions"][0]["lastTransitionTime"] == NOW


def test_a_scaler_of_somebody_else_is_left_alone():
    observed, spec = observed_with(3)
    ((ref, child),) = observed.children.items()
    child.body["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert changed_scalers(Observed(body=observed.body, children={ref: child}, pods=observed.pods), spec, NOW) == []


def test_an_object_whose_scaler_asks_for_no_engine_says_how_to_get_some():
    observed, _ = observed_with(0, decode={"scaling": {"minReplicas": 0, "maxReplicas": 4}}, pods=0)
    target = resolve_target(observed, Operator("acme/operator:1"), "ZnJlc2g=")
    made = {ref_of(manifest): Child({**manifest}) for manifest in target.manifests if manifest["kind"] == "Deployment"}
    running = replace(observed, children={**observed.children, **made})
    ready = ready_condition(make_status(running, target, [], NOW))
    assert (ready["status"], ready["reason"]) == ("False", "ScaledToZero")
    assert "kubectl -n models scale dcpdisaggrolescalers/chat-decode --replicas=1" in ready["message"]
