"""The status: conditions, counts and columns, from observed facts alone."""

import copy
from dataclasses import replace

import pytest

from dcp_operator import names
from dcp_operator.api.load import load_spec
from dcp_operator.api.spec import Geometry
from dcp_operator.api.status import Status
from dcp_operator.compatibility import start_proves_heads
from dcp_operator.observed import Observed
from dcp_operator.reasons import Problem, Reason
from dcp_operator.rules.geometry import context_fits_heads
from dcp_operator.status import make_status
from dcp_operator.target import Operator, Target, resolve_target
from tests.support.objects import owner, pod, spec
from tests.support.simulated_api import SimulatedApi, observe

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
TYPES = [
    "Ready",
    "Available",
    "Progressing",
    "PrefillReady",
    "DecodeReady",
    "RouterReady",
    "ConfigCompatible",
    "KVTransferVerified",
]


def target_of(observed: Observed) -> Target:
    return resolve_target(observed, Operator("acme/operator:1"), "ZnJlc2g=")


def status_of(observed: Observed, *failures: Problem, now: str = EARLY) -> dict:
    return make_status(observed, target_of(observed), failures, now)


def conditions(status: dict) -> dict[str, dict]:
    return {condition["type"]: condition for condition in status["conditions"]}


def world(pods: list[dict] | None = None, *, ready: bool | None = None, **changes) -> Observed:
    """Return an object whose workloads exist; pods are given, or made ready or not by Kubernetes."""
    from dcp_operator.kinds import CHILD_KINDS

    api = SimulatedApi()
    api.put(owner(**changes))
    kinds = {kind.kind: kind for kind in CHILD_KINDS}
    target = target_of(observe(api))
    for manifest in target.manifests:
        api.apply(kinds[manifest["kind"]], "models", manifest)
    if ready is not None:
        api.run_deployments(broken=frozenset() if ready else frozenset({target.revision or ""}))
    observed = observe(api)
    if pods is None:
        return observed
    return Observed(observed.body, observed.children, tuple(pods))


def revision(observed: Observed) -> str:
    return target_of(observed).revision or ""


def test_every_condition_is_there_from_the_first_moment_and_in_a_fixed_order():
    api = SimulatedApi()
    api.put(owner())
    status = status_of(observe(api))
    assert [condition["type"] for condition in status["conditions"]] == TYPES
    said = {kind: (entry["status"], entry["reason"]) for kind, entry in conditions(status).items()}
    assert said == {
        "Ready": ("False", "PodsPending"),
        "Available": ("False", "PodsPending"),
        "Progressing": ("True", "RollingOut"),
        "PrefillReady": ("False", "PodsPending"),
        "DecodeReady": ("False", "PodsPending"),
        "RouterReady": ("False", "PodsPending"),
        "ConfigCompatible": ("True", "RulesPassed"),
        "KVTransferVerified": ("Unknown", "NotChecked"),
    }


def test_all_is_well_when_everything_is_ready():
    observed = world(ready=True)
    status = status_of(observed)
    said = {kind: (entry["status"], entry["reason"]) for kind, entry in conditions(status).items()}
    assert said == {
        "Ready": ("True", "Serving"),
        "Available": ("True", "Serving"),
        "Progressing": ("False", "RolledOut"),
        "PrefillReady": ("True", "PodsReady"),
        "DecodeReady": ("True", "PodsReady"),
        "RouterReady": ("True", "PodsReady"),
        "ConfigCompatible": ("True", "RulesPassed"),
        "KVTransferVerified": ("Unknown", "NotChecked"),
    }
    assert status["currentRevision"] == status["updateRevision"] == revision(observed)
    assert status["observedGeneration"] == 1


def test_a_spec_that_is_refused_has_no_revision_and_no_pod_is_of_it():
    observed = world(ready=True)
    before = status_of(observed)
    refused = copy.deepcopy(dict(observed.body))
    refused["spec"]["decode"]["parallelism"] = {"tensor": 8, "decodeContext": 3}
    status = status_of(replace(observed, body={**refused, "status": before}))
    assert conditions(status)["Ready"]["reason"] == "InvalidSpec"
    assert "updateRevision" not in status
    assert status["currentRevision"] == before["currentRevision"]
    assert status["decode"]["updatedReplicas"] == 0


def test_the_status_is_what_the_crd_allows():
    for observed in (world(ready=True), world(ready=False)):
        Status.model_validate(status_of(observed), by_alias=True, by_name=False)


def test_the_resolved_settings_and_the_columns():
    status = status_of(world(ready=True))
    assert status["resolved"]["decode"] == {
        "tensor": 2,
        "decodeContext": 2,
        "blockSize": 32,
        "kvCacheInterleaveSize": 32,
        "accelerators": 0,
        "maxModelLen": 1024,
    }
    assert status["resolved"]["kvCapacityGain"] == "2x"
    assert status["parallelism"] == "1/1 -> 2/2"
    assert status["prefill"] == {
        "replicas": 1,
        "readyReplicas": 1,
        "updatedReplicas": 1,
        "scheduledReplicas": 1,
    }


def test_ready_turns_false_with_a_new_generation_before_any_pod_has_changed():
    observed = world(ready=True)
    was = status_of(observed)
    body = copy.deepcopy(observed.body)
    body["spec"] = spec(image="acme/engine:2")
    body["metadata"]["generation"] = 2
    body["status"] = was
    edited = Observed(body, observed.children, observed.pods)
    status = status_of(edited, now=LATE)
    ready = conditions(status)["Ready"]
    assert (ready["status"], ready["observedGeneration"]) == ("False", 2)
    assert f"revision {was['currentRevision']} keeps serving" in ready["message"]
    assert status["currentRevision"] == was["currentRevision"] != status["updateRevision"]
    assert status["prefill"] == {
        "replicas": 1,
        "readyReplicas": 1,
        "updatedReplicas": 0,
        "scheduledReplicas": 1,
    }


def test_a_transition_time_changes_with_the_status_and_with_nothing_else():
    observed = world(ready=False)
    first = status_of(observed, now=EARLY)
    later = Observed({**observed.body, "status": first}, observed.children, observed.pods)
    assert status_of(later, now=LATE) == first
    ready = world(ready=True)
    after = conditions(status_of(Observed({**ready.body, "status": first}, ready.children, ready.pods), now=LATE))
    assert after["Ready"]["lastTransitionTime"] == LATE
    assert after["ConfigCompatible"]["lastTransitionTime"] == EARLY


def test_equal_facts_give_an_equal_status():
    observed = world(ready=True)
    once = status_of(observed, now=EARLY)
    again = Observed({**observed.body, "status": once}, observed.children, observed.pods)
    assert status_of(again, now=LATE) == once


def test_the_worst_problem_of_all_components_is_the_reason_of_ready():
    observed = world()
    rev = revision(observed)
    loading = {"name": "main", "state": {"running": {}}, "started": False}
    no_image = {"name": "main", "image": "i", "state": {"waiting": {"reason": "ErrImagePull", "message": "unknown"}}}
    waiting = {"name": "main", "state": {"running": {}}, "started": True}
    pods = [
        pod("prefill", rev, name="p", containers=[loading]),
        pod("decode", rev, name="d", containers=[no_image]),
        pod("router", rev, name="r", containers=[waiting]),
    ]
    said = conditions(status_of(world(pods)))
    assert (
        said["Ready"]["reason"] == said["DecodeReady"]["reason"] == said["Progressing"]["reason"] == "ImagePullFailed"
    )
    assert said["PrefillReady"]["reason"] == "Starting"
    assert said["RouterReady"]["reason"] == "WaitingForEngines"
    assert said["Progressing"]["status"] == "False"


def test_pods_of_other_revisions_and_pods_that_go_make_nothing_ready():
    observed = world()
    rev = revision(observed)
    pods = [
        pod("prefill", "other123", name="a", ready=True),
        pod("decode", rev, name="b", ready=True, deletionTimestamp="2026-01-01T00:00:00Z"),
    ]
    status = status_of(world(pods))
    assert conditions(status)["PrefillReady"]["status"] == "False"
    assert conditions(status)["DecodeReady"]["status"] == "False"
    assert status["decode"]["replicas"] == 0


def test_a_role_with_pods_of_two_templates_is_not_yet_replaced():
    observed = world(ready=True)
    pods = copy.deepcopy(list(observed.pods))
    decode = [one for one in pods if one["metadata"]["labels"][names.LABEL_ROLE] == "decode"]
    decode[0]["metadata"]["labels"]["pod-template-hash"] = "before"
    decode.append(copy.deepcopy(decode[0]))
    decode[1]["metadata"]["labels"]["pod-template-hash"] = "after"
    decode[1]["metadata"]["name"] += "-after"
    pods.append(decode[1])
    deployment = next(child.body for child in observed.workloads() if child.component == "decode")
    deployment["spec"]["replicas"] = deployment["status"]["updatedReplicas"] = 2
    said = conditions(status_of(Observed(observed.body, observed.children, tuple(pods))))
    assert said["DecodeReady"]["status"] == "False"
    assert said["PrefillReady"]["status"] == "True"


def test_pods_that_kubernetes_refuses_to_make_are_reported_with_its_words():
    observed = world()
    child = next(child for ref, child in observed.children.items() if "decode" in ref.name)
    child.body["status"] = {
        "conditions": [
            {"type": "ReplicaFailure", "status": "True", "message": "pods is forbidden: exceeded quota: gpus"}
        ]
    }
    said = conditions(status_of(observed))
    assert said["DecodeReady"]["reason"] == said["Ready"]["reason"] == "PodsRefused"
    assert "exceeded quota: gpus" in said["Ready"]["message"]


def evicted(name: str, created: str, message: str, observed: Observed) -> dict:
    body = pod("decode", revision(observed), name=name, creationTimestamp=created)
    body["status"] = {"phase": "Failed", "reason": "Evicted", "message": message}
    return body


def test_why_the_pod_before_ended_is_said_while_its_replacement_starts():
    observed = world()
    pods = [
        evicted("decode-b", "2026-01-01T00:00:01Z", "The node was low on resource: memory.", observed),
        evicted("decode-a", "2026-01-01T00:00:00Z", "older", observed),
        pod("decode", revision(observed), name="decode-c"),
    ]
    said = conditions(status_of(world(pods)))["DecodeReady"]
    assert said["reason"] == Reason.PODS_PENDING
    assert said["message"].endswith(
        "Before, pod decode-b ended for good: Evicted: The node was low on resource: memory."
    )
    assert "older" not in said["message"]


def test_what_keeps_a_replacement_from_running_is_said_without_its_predecessor():
    observed = world()
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}}
    late = pod("decode", revision(observed), name="decode-c", containers=[{"name": "main", "state": waiting}])
    pods = [evicted("decode-a", "2026-01-01T00:00:00Z", "low on memory", observed), late]
    said = conditions(status_of(world(pods)))["DecodeReady"]
    assert said["reason"] == Reason.IMAGE_PULL_FAILED
    assert "low on memory" not in said["message"]


def test_every_reason_why_something_is_not_well_is_explained_and_no_other(request: pytest.FixtureRequest):
    table = (request.config.rootpath / "docs/how-to/debug.md").read_text().split("## Reasons")[1].split("##")[0]
    explained = {word.strip() for line in table.splitlines()[4:] if line for word in line.split("|")[1].split(",")}
    well = {Reason.RULES_PASSED, Reason.PODS_READY, Reason.ROLLED_OUT, Reason.SERVING, Reason.VERIFIED}
    well |= {Reason.OWN_ROUTER}
    assert explained == set(Reason) - well


def test_a_role_without_replicas_is_said_to_be_the_reason():
    observed = world(ready=True, decode={**spec()["decode"], "replicas": 0})
    said = conditions(status_of(observed))
    assert said["DecodeReady"]["reason"] == said["Ready"]["reason"] == "ScaledToZero"
    assert "raise replicas" in said["Ready"]["message"]


UPSTREAM = {
    "decode": {**spec()["decode"], "parallelism": {"tensor": 2}},
    "kvConnector": {"type": "mooncake-upstream", "protocol": "tcp"},
}


@pytest.mark.parametrize("connector", [{}, UPSTREAM], ids=["bundled", "mooncake-upstream"])
def test_without_routers_the_router_is_the_users_own_and_the_engines_decide(connector: dict):
    observed = world(ready=True, router={"replicas": 0}, **connector)
    status, said = status_of(observed), conditions(status_of(observed))
    for kind in ("Ready", "Available", "RouterReady"):
        assert said[kind]["status"] == "True", kind
    assert said["RouterReady"]["reason"] == "OwnRouter"
    assert "the router is your own" in said["RouterReady"]["message"]
    assert "your own router" in said["Ready"]["message"]
    assert status["currentRevision"] == revision(observed)
    broken = conditions(status_of(world(ready=False, router={"replicas": 0}, **connector)))
    assert {broken[kind]["status"] for kind in ("Ready", "Available")} == {"False"}
    assert broken["RouterReady"]["status"] == "True"


def test_routers_that_are_left_when_the_user_brings_one_are_told():
    observed = world(ready=True, router={"replicas": 0})
    left = pod("router", revision(observed), ready=True)
    said = conditions(status_of(Observed(observed.body, observed.children, (*observed.pods, left))))
    assert (said["RouterReady"]["status"], said["Ready"]["status"]) == ("False", "False")
    assert "1 router pods" in said["Ready"]["message"]


UNKNOWN_MODEL = {"uri": "hf://acme/tiny"}


def test_a_model_of_unknown_shape_is_not_called_compatible_before_engines_run():
    for observed in (world(ready=False, model=UNKNOWN_MODEL), world(model=UNKNOWN_MODEL)):
        said = conditions(status_of(observed))["ConfigCompatible"]
        assert (said["status"], said["reason"]) == ("Unknown", "ModelUnknown")
        assert "unknown-model" in said["message"]


def test_engines_that_run_show_that_their_sizes_suit_an_unknown_model():
    said = conditions(status_of(world(ready=True, model=UNKNOWN_MODEL)))["ConfigCompatible"]
    assert (said["status"], said["reason"]) == ("True", "RulesPassed")
    assert "checked against the model's heads at the start" in said["message"]


@pytest.mark.parametrize(
    ("connector", "status", "reason"),
    [("mooncake", "True", "RulesPassed"), ("mooncake-upstream", "Unknown", "ModelUnknown")],
)
def test_where_vllm_misses_a_case_only_the_bundled_connectors_start_proves_the_heads(
    connector: str, status: str, reason: str
):
    sizes = {"replicas": 1, "parallelism": {"tensor": 12, "decodeContext": 4}, "blockSize": 32}
    roles = {"prefill": sizes, "decode": sizes, "router": {"replicas": 0}, "kvConnector": {"type": connector}}
    said = conditions(status_of(world(ready=True, model=UNKNOWN_MODEL, **roles)))
    assert said["DecodeReady"]["status"] == "True"
    assert (said["ConfigCompatible"]["status"], said["ConfigCompatible"]["reason"]) == (status, reason)


@pytest.mark.parametrize(("tensor", "context"), [(t, w) for t in range(1, 33) for w in range(1, t + 1) if t % w == 0])
def test_a_start_proves_heads_only_where_what_vllm_takes_is_what_the_rules_take(tensor: int, context: int):
    sizes = {"replicas": 1, "parallelism": {"tensor": tensor, "decodeContext": context}, "blockSize": 32}
    loaded = load_spec(owner(decode=sizes, kvConnector={"type": "mooncake-upstream"}))
    assert loaded is not None
    missed = [
        (heads, attention)
        for heads in range(1, tensor + 1)
        for attention in range(heads, 8 * tensor + 1, heads)
        if vllm_takes(tensor, context, heads, attention)
        and not context_fits_heads(context, tensor, shape(heads, attention))
    ]
    assert not (start_proves_heads(loaded) and missed)
    assert start_proves_heads(loaded) or tensor & (tensor - 1)


def vllm_takes(tensor: int, context: int, heads: int, attention: int) -> bool:
    """What vLLM checks at its start (config/model.py, and the sharding of layers), as of 0.32."""
    spread = attention % tensor == 0 and (tensor % heads == 0 or heads % tensor == 0)
    sharded = tensor > heads and context <= tensor // heads and (attention // heads) % context == 0
    return spread and (context == 1 or sharded)


def shape(heads: int, attention: int) -> Geometry:
    return Geometry(attention="gqa", attention_heads=attention, kv_heads=heads, layers=1)


@pytest.mark.parametrize("reason", [Reason.PERMISSION_DENIED, Reason.APPLY_REJECTED, Reason.API_UNAVAILABLE])
def test_what_could_not_be_written_is_the_reason_even_when_pods_are_ready(reason: Reason):
    said = conditions(status_of(world(ready=True), Problem(reason, "could not apply Service chat")))
    assert (said["Ready"]["status"], said["Ready"]["reason"]) == ("False", reason.value)
    assert "could not apply Service chat" in said["Ready"]["message"]


def test_all_findings_of_a_refused_spec_are_in_the_condition():
    bad = {"parallelism": {"tensor": 3, "decodeContext": 2}, "blockSize": 32, "kvCacheInterleaveSize": 7}
    api = SimulatedApi()
    api.put(owner(decode=bad))
    said = conditions(status_of(observe(api)))
    assert said["Ready"]["reason"] == said["ConfigCompatible"]["reason"] == "InvalidSpec"
    for rule in ("dcp-divides-tp", "interleave-divides-block"):
        assert rule in said["ConfigCompatible"]["message"]


def test_reasons_are_words_that_the_api_server_accepts():
    assert all(reason.value.isalpha() and reason.value[0].isupper() for reason in Reason)
