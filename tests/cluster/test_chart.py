"""The chart in a real cluster, installed by the real Helm: first contact, upgrade, renewal, neighbours, uninstall.

The release has a name of its own, lives in a namespace that enforces the restricted Pod Security Standard, and manages
one other namespace.
"""

import contextlib
import hashlib
import json
import socket
import ssl
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster.images import ctr
from devcluster.paths import this_cache
from tests.support.helm import Manifest
from tests.support.release import (
    Caller,
    Release,
    apply_dry,
    eventually,
    get,
    helm,
    kubectl,
    no_other_release,
)

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
HOME, MODELS, NEIGHBOUR = "chart-test-home", "chart-test-models", "chart-test-neighbour"
PREFIX = "team-one-dcp-disagg"
SECRET = f"{PREFIX}-webhook-certificate"
DEFINITION = "dcpdisaggdeployments.dcpdisagg.io"
SCALERS = "dcpdisaggrolescalers.dcpdisagg.io"


def deployment_object(namespace: str = MODELS, **decode: Any) -> Manifest:
    """Return an object that the rules accept and that needs no engine: nobody waits for its pods."""
    return {
        "apiVersion": "dcpdisagg.io/v1alpha1",
        "kind": "DCPDisaggDeployment",
        "metadata": {"name": "chart-test", "namespace": namespace},
        "spec": {
            "model": {
                "uri": "hf://example/model",
                "geometry": {"attention": "gqa", "attentionHeads": 8, "kvHeads": 1, "layers": 4, "maxModelLen": 1024},
            },
            "image": "local.dev/cpu-engine:1",
            "accelerator": {"resourceName": "cpu"},
            "kvConnector": {"protocol": "tcp"},
            "prefill": {"parallelism": {"tensor": 1}},
            "decode": {"parallelism": {"tensor": 2, "decodeContext": 2}, **decode},
        },
    }


#: Prints the files below a folder with their hashes.
_LISTING = """
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
for path in sorted(root.rglob("*")):
    if path.is_file():
        print(path.relative_to(root), hashlib.sha256(path.read_bytes()).hexdigest())
"""

REFUSED = deployment_object(extraArgs=["--kv-transfer-config", "{}"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with no_other_release():
        kubectl("delete", "crd", DEFINITION, SCALERS, "--ignore-not-found")
        for namespace in (HOME, MODELS, NEIGHBOUR):
            kubectl("delete", "namespace", namespace, "--ignore-not-found")
            kubectl("create", "namespace", namespace)
        for namespace in (HOME, NEIGHBOUR):
            kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
        yield
        for release in (Release("team-one", HOME, {}), Release("other", NEIGHBOUR, {})):
            release.uninstall()
        kubectl("delete", "crd", DEFINITION, SCALERS, "--ignore-not-found")
        kubectl("delete", "namespace", HOME, MODELS, NEIGHBOUR)


@pytest.fixture(scope="module")
def first_answer(cluster: None) -> tuple[Release, str]:
    """Install, and ask the webhook before anything else happens."""
    certificate = {"validityDays": 10, "renewBeforeDays": 1}
    release = Release("team-one", HOME, {"watchNamespaces": [MODELS], "webhook": {"certificate": certificate}})
    release.install()
    return release, apply_dry(REFUSED).stderr


@pytest.fixture(scope="module")
def release(first_answer: tuple[Release, str]) -> Release:
    return first_answer[0]


@pytest.fixture(scope="module")
def served(release: Release) -> Manifest:
    """Return an object whose pods exist."""
    manifest = deployment_object()
    kubectl("apply", "--filename", "-", stdin=json.dumps(manifest))
    eventually("the operator made the object's pods", lambda: len(pod_identities()) >= 3)
    return manifest


def pod_identities() -> set[str]:
    return {pod["metadata"]["uid"] for pod in get("pods", "--namespace", MODELS)["items"]}


def certificate() -> dict[str, str]:
    data: dict[str, str] = get("secret", SECRET, "--namespace", HOME)["data"]
    return data


def shown_certificate() -> str:
    """Return what the webhook's Service shows to a client that connects now, in PEM form."""
    address = get("service", f"{PREFIX}-webhook", "--namespace", HOME)["spec"]["clusterIP"]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((address, 443), timeout=5) as plain, context.wrap_socket(plain) as connection:
        shown = connection.getpeercert(binary_form=True)
    assert shown
    return ssl.DER_cert_to_PEM_cert(shown)


def test_the_webhook_refuses_from_the_moment_that_install_returns(first_answer: tuple[Release, str]) -> None:
    _, message = first_answer
    assert 'admission webhook "validate.dcpdisagg.io" denied the request' in message
    assert "spec.decode.extraArgs" in message
    assert "[connector-args]" in message


def test_the_webhook_takes_a_legal_object(release: Release) -> None:
    answer = apply_dry(deployment_object())
    assert answer.returncode == 0, answer.stderr


def test_an_object_outside_the_watched_namespaces_is_left_alone(release: Release) -> None:
    answer = apply_dry(deployment_object(HOME, extraArgs=["--kv-transfer-config", "{}"]))
    assert answer.returncode == 0, answer.stderr


def test_the_controller_has_every_right_that_it_needs(release: Release, served: Manifest) -> None:
    assert "forbidden" not in controller_log().lower()
    status = get("dcpd", "chart-test", "--namespace", MODELS)
    eventually("the object has a status", lambda: get("dcpd", "chart-test", "--namespace", MODELS).get("status"))
    assert status["metadata"]["name"] == "chart-test"


def controller_log() -> str:
    return kubectl("logs", f"deployment/{PREFIX}-controller", "--namespace", HOME, "--tail=-1").stdout


def said_by_controller() -> list[dict[str, object]]:
    """Return the controller's messages with the number of objects that each names, from the lines of JSON."""
    lines = [json.loads(line) for line in controller_log().splitlines() if line.startswith("{")]
    return [{line["message"]: line["objects"]} for line in lines if "objects" in line]


def inside(*command: str) -> str:
    """Run a command in the controller's container and return what it printed."""
    return kubectl("exec", f"deployment/{PREFIX}-controller", "--namespace", HOME, "--", *command).stdout


def test_the_image_holds_what_pods_start_from_it(release: Release) -> None:
    assert inside("dcpctl", "--version").split()[-1] == VERSION
    assert "--vllm-pd-disaggregation" in inside("vllm-router", "--help")
    shipped = inside("python", "-c", _LISTING, "/opt/dcp/connector").splitlines()
    source = ROOT / "connector"
    files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sorted(shipped) == sorted(
        f"{p.relative_to(source)} {hashlib.sha256(p.read_bytes()).hexdigest()}" for p in files
    )


def test_the_operator_runs_as_nobody_in_particular(release: Release) -> None:
    assert inside("id", "-u").strip() == "65532"
    written = "import pathlib; pathlib.Path('/opt/dcp/mine').touch()"
    refused = kubectl(
        *("exec", f"deployment/{PREFIX}-webhook", "--namespace", HOME, "--", "python", "-c", written), check=False
    )
    assert "Read-only file system" in refused.stderr


def test_an_upgrade_to_another_image_keeps_the_certificate_and_the_pods_of_objects(
    release: Release, served: Manifest
) -> None:
    image = "docker.io/dcp-disagg/operator"
    ctr(
        this_cache().cluster, "images", "tag", "--force", f"{image}:{VERSION}", f"{image}:next", what="naming the image"
    )
    pods, before = pod_identities(), certificate()
    caller = Caller(served)
    with caller.running():
        release.upgrade(image={"tag": "next"})
    assert inside("python", "-c", "import os; print(os.environ['DCP_OPERATOR_IMAGE'])").strip().endswith(":next")
    eventually("the new controller watches the object", lambda: {"watching": 1} in said_by_controller())
    assert certificate() == before
    assert pod_identities() == pods
    assert caller.calls > 3
    assert caller.failures == [], "the webhook answers during an upgrade"


def ready_webhooks() -> list[str]:
    """Return the names of the webhook's pods that are ready and not about to go."""
    selector = "app.kubernetes.io/instance=team-one,app.kubernetes.io/component=webhook"
    return [
        pod["metadata"]["name"]
        for pod in get("pods", "--namespace", HOME, "--selector", selector)["items"]
        if "deletionTimestamp" not in pod["metadata"]
        for condition in pod["status"].get("conditions", [])
        if (condition["type"], condition["status"]) == ("Ready", "True")
    ]


def test_a_webhook_pod_that_goes_during_a_load_of_applies_fails_none_of_them(
    release: Release, served: Manifest
) -> None:
    callers = [Caller(served) for _ in range(3)]
    with contextlib.ExitStack() as load:
        for caller in callers:
            load.enter_context(caller.running())
        for _ in range(2):
            eventually("both webhook pods are ready", lambda: len(ready_webhooks()) == 2, within_s=120)
            kubectl("delete", "pod", ready_webhooks()[0], "--namespace", HOME, "--wait=true")
        eventually("both webhook pods are ready again", lambda: len(ready_webhooks()) == 2, within_s=120)
    assert sum(caller.calls for caller in callers) > 30
    assert [failure for caller in callers for failure in caller.failures] == []


def test_an_upgrade_near_the_certificates_end_renews_it_without_a_gap(release: Release, served: Manifest) -> None:
    before = certificate()
    # The present certificate has ten days left: fewer than the default asks for.
    caller = Caller(served)
    with caller.running():
        release.upgrade(webhook={})
        after = certificate()
        assert after["tls.crt"] != before["tls.crt"]
        assert after["ca.crt"] == before["ca.crt"], "a new authority would cut off pods with the old certificate"
        old = shown_certificate()
        eventually("the webhook shows its new certificate", lambda: shown_certificate() != old, within_s=150)
    assert caller.failures == []


def test_two_releases_never_manage_one_namespace(release: Release) -> None:
    for watched in ([], [NEIGHBOUR, MODELS]):
        refused = Release("other", NEIGHBOUR, {"watchNamespaces": watched}).install(check=False)
        assert refused.returncode != 0
        assert f'release "team-one" in namespace "{HOME}" manages {MODELS} already' in refused.stderr


def test_a_second_release_in_another_namespace_works_beside_the_first(release: Release) -> None:
    other = Release("other", NEIGHBOUR, {"watchNamespaces": [NEIGHBOUR], "webhook": {"replicas": 1}})
    said = other.install().stdout
    assert f'belongs to release "team-one" in namespace "{HOME}"' in said
    answer = apply_dry(deployment_object(NEIGHBOUR, extraArgs=["--kv-transfer-config", "{}"]))
    assert "[connector-args]" in answer.stderr
    other.uninstall()
    assert "[connector-args]" in apply_dry(REFUSED).stderr, "the first release still answers"


def test_uninstalling_leaves_the_definition_and_the_objects_alone(release: Release, served: Manifest) -> None:
    pods = pod_identities()
    release.uninstall()
    eventually("the operator's pods are gone", lambda: not get("pods", "--namespace", HOME)["items"])
    kinds = (
        "deployments,services,secrets,serviceaccounts,poddisruptionbudgets,roles,rolebindings,"
        "clusterroles,clusterrolebindings,validatingwebhookconfigurations"
    )
    selector = ("--selector", "app.kubernetes.io/instance=team-one,helm.sh/chart")
    assert get(kinds, "--all-namespaces", *selector)["items"] == []
    assert len(get("crd", DEFINITION, SCALERS)["items"]) == 2
    assert pod_identities() == pods, "engines serve on without the operator"
    kubectl("delete", "dcpd", "chart-test", "--namespace", MODELS, "--wait", "--timeout=30s")
    eventually("the object's pods are gone", lambda: not pod_identities(), within_s=150)


def test_a_definition_left_by_a_release_that_is_gone_is_refused_or_taken_over(release: Release) -> None:
    release.uninstall()
    definition = get("crd", DEFINITION)
    definition["metadata"] = {
        "name": DEFINITION,
        "annotations": {"meta.helm.sh/release-name": "gone", "meta.helm.sh/release-namespace": "nowhere"},
        "labels": definition["metadata"]["labels"],
    }
    definition["spec"]["versions"][0]["additionalPrinterColumns"].pop()
    definition.pop("status")
    kubectl("delete", "crd", DEFINITION)
    apply = ("apply", "--server-side", "--force-conflicts", "--field-manager", "helm", "--filename", "-")
    kubectl(*apply, stdin=json.dumps(definition))
    refused = release.install(check=False)
    assert refused.returncode != 0
    assert 'belongs to release "gone" in namespace "nowhere", which is gone' in refused.stderr
    release.install("--set", "crds.adopt=true", "--take-ownership")
    owner = get("crd", DEFINITION)["metadata"]["annotations"]
    assert owner["meta.helm.sh/release-name"] == "team-one"
    helm("status", "team-one", "--namespace", HOME)
