"""The controller on the real API server and node, with stand-in engines and the real router."""

import base64
import copy
import json
import signal
import time
from pathlib import Path

import pytest
import yaml

from dcp_operator.api.load import load_spec
from dcp_operator.build import render
from dcp_operator.kinds import CHILD_KINDS
from tests.support.cluster import Cluster
from tests.support.operator_process import (
    IMAGE,
    Process,
    apply_as_user,
    conditions,
    controller,
    stand_in,
    wait_for,
)
from tests.support.stand_ins import complete, first_answer, tell

GOLDEN = Path(__file__).parents[1] / "unit" / "golden"
EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = ",".join(kind.plural for kind in CHILD_KINDS)
READY_S = 60.0
REPAIR_S = 5.0


@pytest.fixture(scope="module")
def chat(real: Cluster, namespace: str, operator: Process) -> str:
    """A ready object, shared by the tests that leave it as they found it."""
    apply_as_user(real, namespace, stand_in("chat"))
    wait_until_ready(real, namespace, "chat", operator)
    return "chat"


def get(real: Cluster, namespace: str, name: str) -> dict:
    return real.get("dcpd", name, "-n", namespace)


def ready(real: Cluster, namespace: str, name: str) -> dict:
    return conditions(get(real, namespace, name)).get("Ready", {})


def wait_until_ready(real: Cluster, namespace: str, name: str, operator: Process, timeout_s: float = READY_S) -> None:
    def is_ready() -> bool:
        body = get(real, namespace, name)
        said = conditions(body).get("Ready", {})
        return said.get("status") == "True" and said["observedGeneration"] == body["metadata"]["generation"]

    try:
        wait_for(f"{name} is ready", is_ready, timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{ready(real, namespace, name)}\n{operator.said()[-3000:]}") from None


def children(real: Cluster, namespace: str, name: str) -> dict[tuple[str, str], dict]:
    items = real.get(KINDS, "-n", namespace, "-l", f"dcpdisagg.io/name={name}")["items"]
    return {(item["kind"], item["metadata"]["name"]): item for item in items}


def versions(real: Cluster, namespace: str, name: str) -> dict[tuple[str, str], str]:
    return {ref: item["metadata"]["resourceVersion"] for ref, item in children(real, namespace, name).items()}


def pods(real: Cluster, namespace: str, name: str) -> dict[str, dict]:
    items = real.get("pods", "-n", namespace, "-l", f"dcpdisagg.io/name={name}")["items"]
    return {item["metadata"]["name"]: item for item in items}


def staying(real: Cluster, namespace: str, name: str) -> set[str]:
    """Pods without those that drain."""
    found = pods(real, namespace, name)
    return {pod for pod, body in found.items() if "deletionTimestamp" not in body["metadata"]}


def revisions(real: Cluster, namespace: str, name: str) -> set[str]:
    return {
        item["metadata"]["labels"]["dcpdisagg.io/revision"]
        for (kind, _), item in children(real, namespace, name).items()
        if kind == "Deployment"
    }


@pytest.mark.parametrize("name", ["cpu-demo", "gpu-rdma", "image-delivery"])
def test_the_api_server_accepts_what_is_rendered(real: Cluster, namespace: str, name: str):
    path = EXAMPLES / "cpu-demo.yaml" if name == "cpu-demo" else GOLDEN / f"{name}.input.yaml"
    spec = load_spec(yaml.safe_load(path.read_text()))
    assert spec is not None
    rendered = render(name, namespace, spec, operator_image=IMAGE)
    documents = yaml.safe_dump_all(rendered)
    said = real.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-", input=documents
    )
    assert said.count("serverside-applied (server dry run)") == len(rendered)


def test_an_object_becomes_ready_and_its_service_answers_through_both_roles(real: Cluster, namespace: str, chat: str):
    body = get(real, namespace, chat)
    found = {kind: said["status"] for kind, said in conditions(body).items()}
    # The check of the transfer comes after Ready; tests/cluster/test_transfer_check.py waits for it.
    found.pop("KVTransferVerified")
    assert found == {
        "Ready": "True",
        "Available": "True",
        "Progressing": "False",
        "PrefillReady": "True",
        "DecodeReady": "True",
        "RouterReady": "True",
        "ConfigCompatible": "True",
    }
    assert set(body["status"]["decode"].values()) == {1}
    address = real.get("service", chat, "-n", namespace)["spec"]["clusterIP"]
    # Decode's stand-in says who computed the prompt: both roles were asked, of one revision.
    went = first_answer(address)
    assert (went.recomputed, len(set(went.revisions))) == (None, 1)


def test_the_object_has_no_finalizer_and_no_state_of_kopf(real: Cluster, namespace: str, chat: str):
    metadata = get(real, namespace, chat)["metadata"]
    assert "finalizers" not in metadata
    assert not [key for key in metadata.get("annotations", {}) if "kopf" in key]


def test_both_engines_start_with_the_connector_and_the_key(real: Cluster, namespace: str, chat: str):
    key = real.get("secret", f"{chat}-kv", "-n", namespace)["data"]["key"]
    assert len(base64.b64decode(key)) == 64
    for role in ("prefill", "decode"):
        name = next(name for name in pods(real, namespace, chat) if f"-{role}-" in name)
        look = "import dcp_connector, os; print(dcp_connector.__file__, open(os.environ['DCP_KV_SECRET_FILE']).read())"
        said = real.kubectl("exec", "-n", namespace, name, "-c", "main", "--", "python", "-c", look)
        assert said.split() == ["/dcp-connector/dcp_connector/__init__.py", base64.b64decode(key).decode()]


def test_in_steady_state_nothing_is_written(real: Cluster, namespace: str, chat: str, operator: Process):
    def everything() -> tuple:
        body = get(real, namespace, chat)
        events = real.get("events", "-n", namespace)["items"]
        ours = sorted(item["metadata"]["uid"] for item in events if item["reportingComponent"] == "dcp-operator")
        return body["metadata"]["resourceVersion"], versions(real, namespace, chat), ours

    wait_for("the children stay as they are", lambda: everything() == (time.sleep(2), everything())[1], 30)
    before, said = everything(), operator.said()
    used = operator.cpu_s()
    time.sleep(20)
    assert everything() == before
    assert operator.said() == said
    assert operator.cpu_s() - used < 0.4, "more than 2% of a core"


#: What an object has only with several engines of a role, an autoscaler, or a model that is pulled into a claim.
NOT_OF_THE_SMALLEST = {"PodDisruptionBudget", "DCPDisaggRoleScaler", "Job"}


@pytest.mark.parametrize("kind", [kind.kind for kind in CHILD_KINDS if kind.kind not in NOT_OF_THE_SMALLEST])
def test_a_deleted_child_is_back_within_seconds(real: Cluster, namespace: str, chat: str, kind: str):
    name = next(name for found, name in children(real, namespace, chat) if found == kind)
    before = children(real, namespace, chat)[kind, name]
    real.kubectl("delete", kind.lower(), name, "-n", namespace, "--wait=false")

    def is_back() -> bool:
        found = children(real, namespace, chat).get((kind, name))
        return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

    wait_for(f"{kind} {name} is back", is_back, REPAIR_S)
    if kind == "Secret":
        assert children(real, namespace, chat)[kind, name]["data"] == before["data"], "the engines have the key before"


EDITS = {
    "service selector": ("Service", {"spec": {"selector": {"dcpdisagg.io/role": "nobody"}}}),
    "role rules": ("Role", {"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["*"]}]}),
    "role binding subjects": ("RoleBinding", {"subjects": []}),
    "labels of the account": ("ServiceAccount", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}),
    "our label of the service": ("Service", {"metadata": {"labels": {"dcpdisagg.io/name": None}}}),
    "owner of the secret": ("Secret", {"metadata": {"labels": {"dcpdisagg.io/name": "other"}}}),
    "router replicas": ("Deployment", {"spec": {"replicas": 0}}),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_by_hand_is_repaired_within_seconds(
    real: Cluster, namespace: str, chat: str, operator: Process, case: str
):
    kind, patch = EDITS[case]
    name = max(name for found, name in children(real, namespace, chat) if found == kind)
    before = real.get(kind.lower(), name, "-n", namespace)
    real.kubectl("patch", kind.lower(), name, "-n", namespace, "--type=merge", "-p", json.dumps(patch))

    def wanted(body: dict) -> dict:
        kept = {key: body[key] for key in ("spec", "rules", "subjects", "data") if key in body}
        return {**kept, "labels": body["metadata"]["labels"]}

    wait_for(
        f"{case} is repaired", lambda: wanted(real.get(kind.lower(), name, "-n", namespace)) == wanted(before), REPAIR_S
    )
    wait_until_ready(real, namespace, chat, operator)


def test_a_scale_changes_the_pods_and_not_the_revision(real: Cluster, namespace: str, chat: str, operator: Process):
    before = revisions(real, namespace, chat)
    manifest = stand_in(chat)
    manifest["spec"]["prefill"]["replicas"] = 2
    apply_as_user(real, namespace, manifest)
    wait_until_ready(real, namespace, chat, operator)
    assert revisions(real, namespace, chat) == before
    assert set(get(real, namespace, chat)["status"]["prefill"].values()) == {2}
    apply_as_user(real, namespace, stand_in(chat))
    wait_until_ready(real, namespace, chat, operator)
    assert get(real, namespace, chat)["status"]["prefill"]["replicas"] == 1


def test_a_pod_that_stops_answering_is_in_the_status_at_once(
    real: Cluster, namespace: str, chat: str, operator: Process
):
    name = next(name for name in pods(real, namespace, chat) if "-decode-" in name)
    tell(real, namespace, name, unready="told to be")
    said = wait_for(
        "it is said", lambda: (found := ready(real, namespace, chat))["reason"] == "ProbeFailed" and found, 15
    )
    assert said["status"] == "False"
    assert name in said["message"]
    real.kubectl("delete", "pod", name, "-n", namespace, "--grace-period=1")
    wait_until_ready(real, namespace, chat, operator)


def test_a_new_revision_takes_over_without_the_service_ever_failing(
    real: Cluster, namespace: str, chat: str, operator: Process
):
    old = revisions(real, namespace, chat)
    address = real.get("service", chat, "-n", namespace)["spec"]["clusterIP"]
    manifest = stand_in(chat)
    for role in ("prefill", "decode"):
        manifest["spec"][role]["extraArgs"] = ["--seed=7"]
    apply_as_user(real, namespace, manifest)
    first = wait_for("the status knows the generation", lambda: _generation_seen(real, namespace, chat), 10)
    assert conditions(first)["Ready"]["status"] == "False"
    failures, asked = 0, 0
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        asked += 1
        try:
            complete(address)
        except OSError:
            failures += 1
        said = ready(real, namespace, chat)
        if said["status"] == "True":
            break
    wait_until_ready(real, namespace, chat, operator)
    assert asked > 3
    assert failures == 0
    new = wait_for(
        "the old workloads are gone", lambda: len(found := revisions(real, namespace, chat)) == 1 and found, 20
    )
    assert new != old
    apply_as_user(real, namespace, stand_in(chat))
    wait_until_ready(real, namespace, chat, operator)
    wait_for("back to the first revision", lambda: revisions(real, namespace, chat) == old, 20)


def test_a_refused_object_gets_no_pods_and_says_everything(real: Cluster, namespace: str, operator: Process):
    manifest = stand_in("refused")
    # What the API server itself doesn't refuse.
    manifest["spec"]["prefill"]["extraArgs"] = ["--port=1"]
    manifest["spec"]["decode"]["extraArgs"] = ["-tp=8"]
    apply_as_user(real, namespace, manifest)
    said = wait_for("it is judged", lambda: conditions(get(real, namespace, "refused")).get("ConfigCompatible"), 10)
    assert (said["status"], said["reason"]) == ("False", "InvalidSpec")
    for rule in ("connector-args", "extra-args-contradict"):
        assert rule in said["message"]
    assert children(real, namespace, "refused") == {}
    real.kubectl("delete", "dcpd", "refused", "-n", namespace, "--timeout=10s")


def test_an_image_that_does_not_exist_is_the_reason(real: Cluster, namespace: str, operator: Process):
    apply_as_user(real, namespace, stand_in("noimage", image="registry.invalid/nothing:1"))
    wait_for("it is said", lambda: ready(real, namespace, "noimage").get("reason") == "ImagePullFailed", 30)
    assert "registry.invalid/nothing:1" in ready(real, namespace, "noimage")["message"]
    real.kubectl("delete", "dcpd", "noimage", "-n", namespace, "--timeout=10s")


def test_an_engine_image_without_the_connector_is_the_reason(real: Cluster, namespace: str, operator: Process):
    manifest = stand_in("bare", kvConnector={"protocol": "tcp", "delivery": "Image"})
    for role in ("prefill", "decode"):
        main = manifest["spec"][role]["template"]["spec"]["containers"][0]
        main["command"] = [
            "python",
            "-I",
            "-c",
            "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; import dcp_connector",
        ]
    apply_as_user(real, namespace, manifest)
    wait_for("it is said", lambda: ready(real, namespace, "bare").get("reason") == "ConnectorMissing", 30)
    assert "No module named 'dcp_connector'" in ready(real, namespace, "bare")["message"]
    real.kubectl("delete", "dcpd", "bare", "-n", namespace, "--timeout=10s")


def test_pods_that_fit_on_no_node_are_the_reason(real: Cluster, namespace: str, operator: Process):
    apply_as_user(real, namespace, stand_in("huge", accelerator={"resourceName": "example.com/gpu"}))
    wait_for("it is said", lambda: ready(real, namespace, "huge").get("reason") == "Unschedulable", 30)
    assert "Insufficient example.com/gpu" in ready(real, namespace, "huge")["message"]
    real.kubectl("delete", "dcpd", "huge", "-n", namespace, "--timeout=10s")


def test_a_template_that_the_api_server_refuses_is_reported_with_its_words(
    real: Cluster, namespace: str, operator: Process
):
    manifest = stand_in("odd")
    manifest["spec"]["decode"]["template"]["spec"]["priorityClassName"] = "Not A Name"
    apply_as_user(real, namespace, manifest)
    found = wait_for(
        "it is judged",
        lambda: (
            (said := ready(real, namespace, "odd")).get("reason") in ("ApplyRejected", "InvalidSpec", "PodsRefused")
            and said
        ),
        30,
    )
    assert "priorityClassName" in found["message"] or "Not A Name" in found["message"]
    real.kubectl("delete", "dcpd", "odd", "-n", namespace, "--timeout=10s")


def test_a_service_of_somebody_else_is_left_alone(real: Cluster, namespace: str, operator: Process):
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken", "namespace": namespace},
        "spec": {"ports": [{"port": 1}], "selector": {"app": "theirs"}},
    }
    real.apply(theirs)
    apply_as_user(real, namespace, stand_in("taken"))
    wait_for("it is said", lambda: ready(real, namespace, "taken").get("reason") == "NameTaken", 20)
    assert real.get("service", "taken", "-n", namespace)["spec"]["selector"] == {"app": "theirs"}
    real.kubectl("delete", "service", "taken", "-n", namespace)
    wait_until_ready(real, namespace, "taken", operator, 90)
    real.kubectl("delete", "dcpd", "taken", "-n", namespace, "--timeout=10s")


def test_a_killed_controller_goes_on_where_it_was_and_touches_nothing(
    real: Cluster, namespace: str, chat: str, operator: Process
):
    wait_until_ready(real, namespace, chat, operator)
    wait_for(
        "the children stay as they are",
        lambda: versions(real, namespace, chat) == (time.sleep(2), versions(real, namespace, chat))[1],
        30,
    )
    before, running = versions(real, namespace, chat), staying(real, namespace, chat)
    operator.stop(signal.SIGKILL)
    real.kubectl("delete", "service", chat, "-n", namespace)
    operator.start()
    wait_for("the service is back", lambda: ("Service", chat) in children(real, namespace, chat), 30)
    after = versions(real, namespace, chat)
    changed = {ref for ref in before if after[ref] != before[ref]}
    assert changed == {("Service", chat)}
    assert staying(real, namespace, chat) == running


def test_an_upgrade_of_the_operator_restarts_no_pod(
    real: Cluster, namespace: str, chat: str, operator: Process, tmp_path: Path
):
    wait_until_ready(real, namespace, chat, operator)
    before, running = versions(real, namespace, chat), staying(real, namespace, chat)
    operator.stop()
    try:
        with controller(real, tmp_path, namespace, DCP_OPERATOR_IMAGE="dcp-disagg/operator:9.9.9") as newer:
            wait_for("it has looked", lambda: "watching" in newer.said(), 20)
            time.sleep(3)
            assert versions(real, namespace, chat) == before
            assert staying(real, namespace, chat) == running
    finally:
        operator.start()


def test_two_objects_in_one_namespace_keep_out_of_each_others_way(
    real: Cluster, namespace: str, chat: str, operator: Process
):
    before = versions(real, namespace, chat)
    apply_as_user(real, namespace, stand_in("other"))
    wait_until_ready(real, namespace, "other", operator)
    assert {name for _, name in children(real, namespace, "other")} & {name for _, name in before} == set()
    real.kubectl("delete", "dcpd", "other", "-n", namespace, "--timeout=10s")
    wait_for("its children are gone", lambda: children(real, namespace, "other") == {}, 60)
    assert set(versions(real, namespace, chat)) == set(before)


def test_an_object_made_anew_under_its_name_waits_for_the_old_children(
    real: Cluster, namespace: str, operator: Process
):
    apply_as_user(real, namespace, stand_in("again"))
    wait_until_ready(real, namespace, "again", operator)
    key = real.get("secret", "again-kv", "-n", namespace)["data"]["key"]
    real.kubectl("delete", "dcpd", "again", "-n", namespace, "--timeout=10s")
    apply_as_user(real, namespace, stand_in("again"))
    wait_until_ready(real, namespace, "again", operator, 90)
    assert real.get("secret", "again-kv", "-n", namespace)["data"]["key"] != key
    real.kubectl("delete", "dcpd", "again", "-n", namespace, "--timeout=10s")


def test_deleting_the_object_removes_everything_even_with_the_operator_gone(
    real: Cluster, namespace: str, chat: str, operator: Process
):
    operator.stop()
    try:
        real.kubectl("delete", "dcpd", chat, "-n", namespace, "--timeout=10s")
        wait_for("the children are gone", lambda: children(real, namespace, chat) == {}, 60)
        wait_for(
            "the pods go",
            lambda: all("deletionTimestamp" in pod["metadata"] for pod in pods(real, namespace, chat).values()),
            60,
        )
    finally:
        operator.start()


def test_the_log_has_no_traceback_and_no_key(operator: Process):
    said = operator.said()
    assert "Traceback" not in said
    assert "data" not in [word for line in said.splitlines() for word in line.split()]


def _generation_seen(real: Cluster, namespace: str, name: str) -> dict | None:
    body = copy.deepcopy(get(real, namespace, name))
    return body if body["status"]["observedGeneration"] == body["metadata"]["generation"] else None
