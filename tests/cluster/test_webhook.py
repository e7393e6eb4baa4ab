"""The webhook behind the real API server: refusals, warnings, and what it lets pass."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, cluster
from tests.support.operator_process import (
    Webhook,
    apply_as_user,
    make_certificate,
    stand_in,
    wait_for,
    webhook,
    webhook_configuration,
    without_release,
)


@pytest.fixture(scope="module")
def real() -> Iterator[Cluster]:
    with without_release(cluster(), image=False) as found:
        yield found


@pytest.fixture(scope="module")
def namespace(real: Cluster) -> Iterator[str]:
    with real.namespace("webhook") as name:
        yield name


@pytest.fixture(scope="module")
def server(real: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    with webhook(real, tmp_path_factory.mktemp("webhook"), namespace) as found:
        yield found


@pytest.fixture(autouse=True)
def _clean(real: Cluster, namespace: str, server: Webhook) -> Iterator[None]:
    yield
    real.kubectl("delete", "dcpd", "--all", "-n", namespace, "--timeout=20s")


def refusal(real: Cluster, namespace: str, manifest: dict) -> str:
    with pytest.raises(AssertionError) as refused:
        apply_as_user(real, namespace, manifest)
    return str(refused.value)


def broken() -> dict:
    """Return an object that the schema and its CEL rules take and the rule engine refuses twice."""
    manifest = stand_in("broken")
    manifest["spec"]["prefill"]["extraArgs"] = ["--port=1"]
    manifest["spec"]["decode"]["extraArgs"] = ["-tp=8"]
    return manifest


def review(manifest: dict, operation: str = "CREATE") -> bytes:
    request = {
        "uid": "a-uid",
        "operation": operation,
        "resource": {"group": "dcpdisagg.io", "version": "v1alpha1", "resource": "dcpdisaggdeployments"},
        "userInfo": {"username": "somebody"},
        "object": manifest,
    }
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def test_all_findings_are_in_one_refusal_a_line_each(real: Cluster, namespace: str):
    said = refusal(real, namespace, broken())
    assert 'admission webhook "validate.dcpdisagg.io" denied the request: ' in said
    lines = said.partition("denied the request: ")[2].splitlines()
    rules = [line.rpartition("[")[2].rstrip("]") for line in lines]
    assert rules == ["connector-args", "extra-args-contradict"]
    assert all(line.startswith("spec.") for line in lines)
    assert "dcpd" not in real.kubectl("get", "dcpd", "-n", namespace, "-o", "name")


def test_a_valid_object_is_taken(real: Cluster, namespace: str):
    assert "created" in apply_as_user(real, namespace, stand_in("good"))


def test_an_update_is_judged_as_a_whole(real: Cluster, namespace: str):
    apply_as_user(real, namespace, stand_in("good"))
    manifest = stand_in("good")
    manifest["spec"]["prefill"]["kvCacheDtype"] = "fp8"
    assert "kv-dtype-equal" in refusal(real, namespace, manifest)


def test_a_warning_reaches_the_user_and_the_object_is_taken(real: Cluster, namespace: str, server: Webhook):
    manifest = stand_in("unknown")
    del manifest["spec"]["model"]["geometry"]
    result = subprocess.run(
        ["kubectl", f"--kubeconfig={real.kubeconfig}", "apply", "-n", namespace, "-f", "-"],
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Warning: spec.model.geometry" in result.stderr
    assert "unknown-model" in result.stderr


def test_what_leaves_the_spec_alone_passes_even_if_the_spec_would_be_refused_now(
    real: Cluster, namespace: str, server: Webhook
):
    name = f"dcp-test-{namespace}"
    configuration = real.get("validatingwebhookconfiguration", name)
    real.kubectl("delete", "validatingwebhookconfiguration", name)
    wait_for("the webhook is not asked", lambda: _would_be_taken(real, namespace, broken()), 20)
    apply_as_user(real, namespace, broken())
    for key in ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields"):
        configuration["metadata"].pop(key, None)
    real.apply(configuration)
    another = {**broken(), "metadata": {"name": "b2"}}
    wait_for("the webhook is asked again", lambda: not _would_be_taken(real, namespace, another), 20)
    real.kubectl("label", "dcpd", "broken", "-n", namespace, "team=search")
    real.kubectl(
        "patch", "dcpd", "broken", "-n", namespace, "--type=merge", "-p", '{"metadata":{"finalizers":["a.b/c"]}}'
    )
    real.kubectl("delete", "dcpd", "broken", "-n", namespace, "--wait=false")
    # The object is being deleted: its spec may be edited, and the finalizer must be removable.
    real.kubectl("patch", "dcpd", "broken", "-n", namespace, "--type=merge", "-p", '{"spec":{"decode":{"replicas":2}}}')
    real.kubectl("patch", "dcpd", "broken", "-n", namespace, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    wait_for("it is gone", lambda: "broken" not in real.kubectl("get", "dcpd", "-n", namespace, "-o", "name"), 20)


def test_nothing_is_asked_about_a_delete_even_with_the_webhook_down(real: Cluster, namespace: str, tmp_path: Path):
    apply_as_user(real, namespace, stand_in("good"))
    down = webhook_configuration((namespace,), "https://127.0.0.1:9/validate", b"")
    down["metadata"]["name"] += "-down"
    del down["webhooks"][0]["clientConfig"]["caBundle"]
    real.apply(down)
    try:
        changed = stand_in("good", image="acme/engine:2")
        wait_for("it is down", lambda: not _would_be_taken(real, namespace, changed), 20)
        real.kubectl("delete", "dcpd", "good", "-n", namespace, "--timeout=10s")
    finally:
        real.kubectl("delete", "validatingwebhookconfiguration", down["metadata"]["name"])


def test_a_large_object_is_judged_like_any_other(real: Cluster, namespace: str, server: Webhook):
    manifest = broken()
    env = [{"name": f"V{number}", "value": "x" * 1000} for number in range(900)]
    manifest["spec"]["decode"]["template"]["spec"]["containers"][0]["env"] = env
    with pytest.raises(AssertionError) as refused:
        real.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(manifest))
    assert "extra-args-contradict" in str(refused.value)
    status, answer = server.post("/validate", review({**manifest, "metadata": {"name": "x" * 1_500_000}}))
    assert status == 200
    assert json.loads(answer)["response"]["allowed"] is False


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b"[]",
        b"null",
        b"{}",
        b'{"request": 3}',
        b'{"request": {"uid": "u"}}',
        b"\xff\xfe",
        json.dumps({"request": {"uid": "u", "resource": {"group": "g", "version": "v", "resource": "r"}}}).encode(),
    ],
)
def test_what_is_no_review_is_refused_in_words(server: Webhook, body: bytes):
    status, answer = server.post("/validate", body)
    assert status == 200
    response = json.loads(answer)["response"]
    assert response["allowed"] is False
    assert "webhook" in response["status"]["message"]


@pytest.mark.parametrize(
    "manifest",
    [
        {"spec": []},
        {"spec": {"model": "x"}},
        {"metadata": {"name": "a"}, "spec": {"decode": {"template": {"spec": {"containers": "main"}}}}},
        {"apiVersion": "dcpdisagg.io/v1", "kind": "Other"},
        {"metadata": {"name": "\u202e" * 253}, "spec": {}},
    ],
)
def test_an_object_of_another_shape_is_refused_in_words(server: Webhook, manifest: dict):
    body = {"apiVersion": "dcpdisagg.io/v1alpha1", "kind": "DCPDisaggDeployment", "metadata": {}, **manifest}
    status, answer = server.post("/validate", review(body))
    assert status == 200
    response = json.loads(answer)["response"]
    assert response["allowed"] is False
    assert "[schema]" in response["status"]["message"]
    assert "Traceback" not in response["status"]["message"]


def test_a_renewed_certificate_is_served_without_a_restart(real: Cluster, namespace: str, server: Webhook):
    before = server.served_certificate()
    make_certificate(server.folder)
    wait_for("the new certificate is served", lambda: server.served_certificate() != before, 15)
    ca = base64.b64encode((server.folder / "tls.crt").read_bytes()).decode()
    patch = [{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": ca}]
    real.kubectl(
        "patch", "validatingwebhookconfiguration", f"dcp-test-{namespace}", "--type=json", "-p", json.dumps(patch)
    )
    changed = stand_in("good", image="acme/engine:3")
    wait_for("reviews are answered with it", lambda: _would_be_taken(real, namespace, changed), 20)


def test_a_certificate_that_is_broken_for_a_moment_changes_nothing(server: Webhook):
    before = server.served_certificate()
    kept = (server.folder / "tls.crt").read_bytes()
    (server.folder / "tls.crt").write_bytes(b"half a certi")
    wait_for("it is said", lambda: "certificate not usable" in server.process.said(), 15)
    (server.folder / "tls.crt").write_bytes(kept)
    assert server.served_certificate() == before
    assert server.process.is_running()


def test_the_log_has_no_traceback(server: Webhook):
    assert "Traceback" not in server.process.said()


def _would_be_taken(real: Cluster, namespace: str, manifest: dict) -> bool:
    """Whether a manifest is admitted. It is not stored: what is the same as what is stored is never judged again."""
    try:
        apply_as_user(real, namespace, manifest, "--dry-run=server")
    except AssertionError:
        return False
    return True
