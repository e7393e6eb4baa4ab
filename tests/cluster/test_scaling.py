"""Scaling on the real API server: what kubectl, an autoscaler and a user of the object each get to say."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.operator_process import (
    Process,
    Webhook,
    apply_as_user,
    conditions,
    stand_in,
    wait_for,
    webhook,
)
from tests.support.pod_metrics import pod_metric

SCALED = {"replicas": None, "scaling": {"minReplicas": 1, "maxReplicas": 3}}
REACTION_S = 20.0
READY_S = 60.0
#: An autoscaler looks every 15 s, and learns of a metrics API as often.
AUTOSCALER_S = 120.0
METRIC = "vllm_num_requests_running"
SCALER = "dcpdisaggrolescalers"


@pytest.fixture(scope="module")
def admission(real: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    with webhook(real, tmp_path_factory.mktemp("webhook"), namespace) as found:
        yield found


@pytest.fixture(scope="module")
def chat(real: Cluster, namespace: str, operator: Process, admission: Webhook) -> str:
    """A ready object whose decode role is left to an autoscaler. Tests leave it with one decode engine."""
    apply_as_user(real, namespace, scaled())
    wait_for("chat is ready", lambda: ready(real, namespace)["status"] == "True", READY_S)
    return "chat"


def scaled(**changes) -> dict:
    """The object as its user keeps it: without a number for decode."""
    manifest = stand_in("chat", decode=dict(SCALED), drainTimeoutSeconds=1, **changes)
    del manifest["spec"]["decode"]["replicas"]
    return manifest


def ready(real: Cluster, namespace: str) -> dict:
    return conditions(real.get("dcpd", "chat", "-n", namespace)).get("Ready", {"status": "", "reason": ""})


def scaler(real: Cluster, namespace: str, role: str = "decode") -> dict:
    return real.get(SCALER, f"chat-{role}", "-n", namespace)


def bounded(real: Cluster, namespace: str) -> tuple[str, str]:
    said = conditions(scaler(real, namespace)).get("Bounded", {})
    return said.get("reason", ""), said.get("message", "")


def engines(real: Cluster, namespace: str, role: str = "decode") -> int:
    selector = f"dcpdisagg.io/name=chat,dcpdisagg.io/role={role}"
    found = real.get("deployments", "-n", namespace, "-l", selector)["items"]
    return sum(deployment["spec"]["replicas"] for deployment in found)


def ask_for(real: Cluster, namespace: str, replicas: int) -> None:
    real.kubectl("scale", f"{SCALER}/chat-decode", "-n", namespace, f"--replicas={replicas}")


def wait_for_engines(real: Cluster, namespace: str, count: int, role: str = "decode") -> None:
    wait_for(f"{count} {role} engines", lambda: engines(real, namespace, role) == count, REACTION_S)


def test_a_scaler_begins_with_the_minimum_and_belongs_to_the_object(real: Cluster, namespace: str, chat: str) -> None:
    body = scaler(real, namespace)
    assert body["spec"] == {"replicas": 1}
    assert body["metadata"]["ownerReferences"][0]["kind"] == "DCPDisaggDeployment"
    wait_for("the scaler has counted", lambda: scaler(real, namespace).get("status", {}).get("replicas") == 1, 10)
    assert bounded(real, namespace)[0] == "Within"
    selector = scaler(real, namespace)["status"]["selector"]
    pods = real.get("pods", "-n", namespace, "-l", selector)["items"]
    assert {pod["metadata"]["labels"]["dcpdisagg.io/role"] for pod in pods} == {"decode"}


def test_kubectl_scale_is_followed_and_its_number_is_never_written_back(
    real: Cluster, namespace: str, chat: str
) -> None:
    revision = real.get("dcpd", chat, "-n", namespace)["status"]["currentRevision"]
    ask_for(real, namespace, 2)
    wait_for_engines(real, namespace, 2)
    wait_for("both are counted", lambda: scaler(real, namespace)["status"]["replicas"] == 2, READY_S)
    assert real.get("dcpd", chat, "-n", namespace)["status"]["updateRevision"] == revision, "a scale never rolls"
    owners = {
        entry["manager"]: entry
        for entry in scaler_with_owners(real, namespace)["metadata"]["managedFields"]
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    assert "dcp-operator" not in owners, "server-side apply would take the number back"
    ask_for(real, namespace, 1)
    wait_for_engines(real, namespace, 1)


def scaler_with_owners(real: Cluster, namespace: str) -> dict:
    shown = real.kubectl("get", SCALER, "chat-decode", "-n", namespace, "-o", "json", "--show-managed-fields")
    return json.loads(shown)


def test_what_is_beyond_the_bounds_is_held_and_the_scaler_says_so(real: Cluster, namespace: str, chat: str) -> None:
    ask_for(real, namespace, 7)
    wait_for_engines(real, namespace, 3)
    wait_for("the bound is said", lambda: bounded(real, namespace)[0] == "ClampedToMax", 10)
    assert bounded(real, namespace)[1] == "7 asked for, 3 run: spec.decode.scaling.maxReplicas is 3"
    assert scaler(real, namespace)["spec"] == {"replicas": 7}
    ask_for(real, namespace, 1)
    wait_for_engines(real, namespace, 1)


def test_the_ratio_holds_a_role_back_and_lets_it_go(real: Cluster, namespace: str, chat: str) -> None:
    apply_as_user(real, namespace, scaled(ratio={"min": "1:2"}))
    ask_for(real, namespace, 3)
    wait_for_engines(real, namespace, 2)
    wait_for("the ratio is said", lambda: bounded(real, namespace)[0] == "HeldByRatio", 10)
    assert "spec.ratio.min is 1:2 beside 1 prefill" in bounded(real, namespace)[1]
    apply_as_user(real, namespace, scaled())
    wait_for_engines(real, namespace, 3)
    ask_for(real, namespace, 1)
    wait_for_engines(real, namespace, 1)


def test_a_horizontal_pod_autoscaler_scales_a_role_by_a_metric_of_its_pods(
    real: Cluster, namespace: str, chat: str, tmp_path: Path
) -> None:
    manifest = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat-decode", "namespace": namespace},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "dcpdisagg.io/v1alpha1",
                "kind": "DCPDisaggRoleScaler",
                "name": "chat-decode",
            },
            "minReplicas": 1,
            "maxReplicas": 3,
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {"metric": {"name": METRIC}, "target": {"type": "AverageValue", "averageValue": "24"}},
                }
            ],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }
    with pod_metric(real, namespace, tmp_path, METRIC) as running:
        running.total = 48
        real.apply(manifest)
        try:
            # Twice the target of one engine: this number is computed.
            wait_for("the autoscaler's number", lambda: scaler(real, namespace)["spec"]["replicas"] == 2, AUTOSCALER_S)
            wait_for_engines(real, namespace, 2)
            assert set(running.asked) == {scaler(real, namespace)["status"]["selector"]}, "of this role's engines"
            said = conditions(real.get("hpa", "chat-decode", "-n", namespace))
            assert (said["AbleToScale"]["status"], said["ScalingActive"]["status"]) == ("True", "True")
            running.total = 20
            wait_for("it is lowered again", lambda: scaler(real, namespace)["spec"]["replicas"] == 1, AUTOSCALER_S)
            wait_for_engines(real, namespace, 1)
        finally:
            real.kubectl("delete", "hpa", "chat-decode", "-n", namespace)


def test_an_apply_with_a_number_is_refused_while_an_autoscaler_owns_it(
    real: Cluster, namespace: str, chat: str
) -> None:
    ask_for(real, namespace, 2)
    wait_for_engines(real, namespace, 2)
    manifest = scaled()
    manifest["spec"]["decode"]["replicas"] = 1
    with pytest.raises(AssertionError, match=r"spec\.decode\.replicas: .*\[replicas-or-scaling\]"):
        apply_as_user(real, namespace, manifest)
    # The same apply as before is none of the number's business.
    apply_as_user(real, namespace, scaled())
    assert scaler(real, namespace)["spec"] == {"replicas": 2}
    assert engines(real, namespace) == 2
    ask_for(real, namespace, 1)
    wait_for_engines(real, namespace, 1)


def test_labels_and_owner_are_repaired_without_the_number(real: Cluster, namespace: str, chat: str) -> None:
    ask_for(real, namespace, 2)
    where = (SCALER, "chat-decode", "-n", namespace)
    real.kubectl("label", *where, "app.kubernetes.io/managed-by=me", "--overwrite")
    wait_for(
        "the label is repaired",
        lambda: scaler(real, namespace)["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "dcp-operator",
        REACTION_S,
    )
    assert scaler(real, namespace)["spec"] == {"replicas": 2}
    ask_for(real, namespace, 1)
    wait_for_engines(real, namespace, 1)


def test_a_role_goes_to_zero_and_comes_back_and_the_object_says_so(real: Cluster, namespace: str, chat: str) -> None:
    """By the scale subresource, which is where KEDA acts; KEDA itself isn't in the cluster."""
    manifest = scaled()
    manifest["spec"]["decode"]["scaling"] = {"minReplicas": 0, "maxReplicas": 3}
    apply_as_user(real, namespace, manifest)
    ask_for(real, namespace, 0)
    wait_for_engines(real, namespace, 0)
    wait_for("it says so", lambda: ready(real, namespace)["reason"] == "ScaledToZero", REACTION_S)
    assert ready(real, namespace)["status"] == "False"
    assert bounded(real, namespace)[0] == "Within"
    assert engines(real, namespace, "prefill") == 1, "the other role stays"
    ask_for(real, namespace, 1)
    wait_for("it answers again", lambda: ready(real, namespace)["status"] == "True", READY_S)
    apply_as_user(real, namespace, scaled())


def test_switching_scaling_off_is_warned_about_and_deletes_the_scaler(real: Cluster, namespace: str, chat: str) -> None:
    manifest = scaled()
    del manifest["spec"]["decode"]["scaling"]
    manifest["spec"]["decode"]["replicas"] = 2
    wait_for_engines(real, namespace, 1)
    applied = subprocess.run(
        ["kubectl", f"--kubeconfig={real.kubeconfig}", "apply", "-n", namespace, "-f", "-"],
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "autoscalers of DCPDisaggRoleScaler chat-decode lose their target" in applied.stderr
    assert "[scaling-handover]" in applied.stderr
    wait_for(
        "the scaler is gone",
        lambda: "chat-decode" not in real.kubectl("get", SCALER, "-n", namespace, "-o", "name"),
        REACTION_S,
    )
    wait_for_engines(real, namespace, 2)
    apply_as_user(real, namespace, scaled())
    wait_for("the scaler is back", lambda: "chat-decode" in real.kubectl("get", SCALER, "-n", namespace), REACTION_S)
    assert scaler(real, namespace)["spec"] == {"replicas": 2}, "switching scaling on takes no engine away"
