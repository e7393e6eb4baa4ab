"""What the chart renders, over a matrix of values: every manifest, its pods, names and references."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dcp_operator import webhook
from dcp_operator.catalogue import read_entries
from tests.support.helm import CHART, Manifest, only, render, run_client
from tests.support.pod_security import restricted_violations

RELEASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "default values": ({}, "rel", "home"),
    "a release named like the chart": ({}, "dcp-disagg", "dcp-system"),
    "names as long as Helm allows": ({}, "r" * 53, "n" * 63),
    "a release with dots in its name": ({}, "team.one", "home"),
    "names that look like numbers": ({"watchNamespaces": ["12"], "priorityClassName": "7"}, "42", "1e3"),
    "an override of every name": ({"fullnameOverride": "operator"}, "rel", "home"),
    "two watched namespaces": ({"watchNamespaces": ["models", "research"]}, "rel", "home"),
    "a certificate of the user": (
        {"webhook": {"certificate": {"existingSecret": "mine", "caBundle": "-----BEGIN CERTIFICATE-----\nx\n"}}},
        "rel",
        "home",
    ),
    "models of the installation": (
        {
            "catalogue": {
                "models": [{"names": ["a/b"], "attention": "mla", "attentionHeads": 8, "kvHeads": 1, "layers": 1}]
            }
        },
        "rel",
        "home",
    ),
    "one webhook pod": ({"webhook": {"replicas": 1}}, "rel", "home"),
    "no definition": ({"crds": {"install": False}}, "rel", "home"),
    "a definition that goes with the release": ({"crds": {"keep": False}}, "rel", "home"),
    "placement and labels": (
        {
            "image": {"repository": "registry.local:5000/team/operator", "tag": "1.2.3", "pullPolicy": "Always"},
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "priorityClassName": "system-cluster-critical",
            "podLabels": {"team": "inference", "app.kubernetes.io/name": "other"},
            "podAnnotations": {"note": "yes"},
        },
        "rel",
        "home",
    ),
}

CLUSTER_SCOPED = {
    "CustomResourceDefinition",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingWebhookConfiguration",
}


@pytest.fixture(scope="module", params=RELEASES, ids=lambda name: name.replace(" ", "-"))
def rendered(request: pytest.FixtureRequest) -> tuple[list[Manifest], str, str]:
    values, release, namespace = RELEASES[request.param]
    return render(values, release=release, namespace=namespace), release, namespace


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            yield manifest["metadata"]["name"], manifest["spec"]["template"]


def test_lint_finds_nothing_to_warn_about() -> None:
    run_client("helm", "lint", "--strict", CHART)


def test_every_manifest_names_itself_once(rendered: tuple[list[Manifest], str, str]) -> None:
    manifests, _, _ = rendered
    keys = [(m["kind"], m["metadata"].get("namespace"), m["metadata"]["name"]) for m in manifests]
    assert len(keys) == len(set(keys))
    assert all(m["apiVersion"] for m in manifests)


def test_every_namespaced_manifest_says_its_namespace(rendered: tuple[list[Manifest], str, str]) -> None:
    manifests, _, namespace = rendered
    for manifest in manifests:
        where = manifest["metadata"].get("namespace")
        if manifest["kind"] in CLUSTER_SCOPED:
            assert where is None, manifest["metadata"]["name"]
        elif manifest["kind"] in ("Role", "RoleBinding"):
            assert where in ("models", "research", "12")
        else:
            assert where == namespace, manifest["metadata"]["name"]


def test_names_fit_and_derive_from_the_release(rendered: tuple[list[Manifest], str, str]) -> None:
    manifests, release, namespace = rendered
    for manifest in manifests:
        name, kind = manifest["metadata"]["name"], manifest["kind"]
        if kind == "CustomResourceDefinition":
            continue
        if kind in CLUSTER_SCOPED or kind in ("Role", "RoleBinding"):
            assert name.startswith(f"{namespace}."), "cluster-scoped names of two releases must differ"
            assert len(name) <= 253
        else:
            assert len(name) <= 63
            assert "." not in name
            assert name.startswith(("operator", release[:40].replace(".", "-")))


def test_every_object_carries_the_common_labels(rendered: tuple[list[Manifest], str, str]) -> None:
    manifests, release, _ = rendered
    for manifest in manifests:
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == release
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/name"] == "dcp-disagg"
        assert labels["app.kubernetes.io/version"]
        assert all(len(value) <= 63 for value in labels.values())


def test_a_restricted_namespace_takes_every_pod(rendered: tuple[list[Manifest], str, str]) -> None:
    manifests, _, _ = rendered
    found = {name: restricted_violations(pod["spec"]) for name, pod in pods(manifests)}
    assert len(found) == 2
    assert all(violations == [] for violations in found.values()), found


def test_no_container_can_write_its_image_or_take_a_node_over(rendered: tuple[list[Manifest], str, str]) -> None:
    manifests, _, _ = rendered
    for name, pod in pods(manifests):
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
            assert "memory" in container["resources"]["limits"], name
            assert container["readinessProbe"], name
            assert container["livenessProbe"], name


def test_selectors_meet_exactly_their_own_pods(rendered: tuple[list[Manifest], str, str]) -> None:
    manifests, _, _ = rendered
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests)}
    selectors = {
        m["metadata"]["name"]: m["spec"]["selector"].get("matchLabels", m["spec"]["selector"])
        for m in manifests
        if m["kind"] in ("Deployment", "Service", "PodDisruptionBudget")
    }
    for name, selector in selectors.items():
        met = [pod for pod, own in labels.items() if selector.items() <= own.items()]
        assert met == [name], f"{name} selects {met}"


def test_everything_that_a_pod_refers_to_exists(rendered: tuple[list[Manifest], str, str]) -> None:
    manifests, _, _ = rendered
    accounts = {m["metadata"]["name"] for m in manifests if m["kind"] == "ServiceAccount"}
    secrets = {m["metadata"]["name"] for m in manifests if m["kind"] == "Secret"} | {"mine"}
    for _, pod in pods(manifests):
        spec = pod["spec"]
        assert spec["serviceAccountName"] in accounts
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
                assert {item["key"] for item in volume["secret"]["items"]} == {"tls.crt", "tls.key"}


def test_the_webhook_configuration_calls_the_webhooks_service(rendered: tuple[list[Manifest], str, str]) -> None:
    manifests, _, namespace = rendered
    service = only(manifests, "Service", "-webhook")
    [webhook] = only(manifests, "ValidatingWebhookConfiguration")["webhooks"]
    assert webhook["clientConfig"]["service"] == {
        "name": service["metadata"]["name"],
        "namespace": namespace,
        "path": "/validate",
        "port": service["spec"]["ports"][0]["port"],
    }
    container = only(manifests, "Deployment", "-webhook")["spec"]["template"]["spec"]["containers"][0]
    [port] = [port for port in container["ports"] if port["name"] == service["spec"]["ports"][0]["targetPort"]]
    assert {"name": "DCP_WEBHOOK_PORT", "value": str(port["containerPort"])} in container["env"]
    assert webhook["failurePolicy"] == "Fail"
    assert webhook["sideEffects"] == "None"
    assert webhook["matchPolicy"] == "Equivalent"
    assert webhook["rules"] == [
        {
            "apiGroups": ["dcpdisagg.io"],
            "apiVersions": ["v1alpha1"],
            "resources": ["dcpdisaggdeployments"],
            "operations": ["CREATE", "UPDATE"],
            "scope": "Namespaced",
        }
    ]


def test_watched_namespaces_narrow_webhook_and_controller() -> None:
    manifests = render({"watchNamespaces": ["models", "research", "models"]})
    [webhook] = only(manifests, "ValidatingWebhookConfiguration")["webhooks"]
    assert webhook["namespaceSelector"]["matchExpressions"] == [
        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["models", "research"]}
    ]
    container = only(manifests, "Deployment", "-controller")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "DCP_WATCH_NAMESPACES", "value": "models,research"} in container["env"]
    everywhere = only(render(), "ValidatingWebhookConfiguration")["webhooks"][0]
    assert "namespaceSelector" not in everywhere


def test_one_controller_at_a_time_and_never_no_webhook() -> None:
    manifests = render()
    controller = only(manifests, "Deployment", "-controller")["spec"]
    assert controller["replicas"] == 1
    assert controller["strategy"] == {"type": "Recreate"}
    webhook = only(manifests, "Deployment", "-webhook")["spec"]
    assert webhook["replicas"] == 2
    assert webhook["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert webhook["minReadySeconds"] > 0
    assert only(manifests, "PodDisruptionBudget")["spec"]["minAvailable"] == 1
    single = render({"webhook": {"replicas": 1}})
    assert not [m for m in single if m["kind"] == "PodDisruptionBudget"], "it would block every drain"


def test_image_and_placement_reach_both_pods_and_the_pods_that_the_operator_makes() -> None:
    values, release, namespace = RELEASES["placement and labels"]
    manifests = render(values, release=release, namespace=namespace)
    for name, pod in pods(manifests):
        spec = pod["spec"]
        assert spec["containers"][0]["image"] == "registry.local:5000/team/operator:1.2.3", name
        assert spec["containers"][0]["imagePullPolicy"] == "Always"
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert spec["nodeSelector"] == {"pool": "system"}
        assert spec["tolerations"] == values["tolerations"]
        assert spec["priorityClassName"] == "system-cluster-critical"
        assert pod["metadata"]["labels"]["team"] == "inference"
        assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "dcp-disagg", "the chart's own labels win"
        assert pod["metadata"]["annotations"] == {"note": "yes"}
    environment = only(manifests, "Deployment", "-controller")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "DCP_OPERATOR_IMAGE", "value": "registry.local:5000/team/operator:1.2.3"} in environment
    assert {"name": "DCP_OPERATOR_IMAGE_PULL_POLICY", "value": "Always"} in environment
    # NetworkPolicies let the controller in by its namespace.
    own = {"fieldRef": {"fieldPath": "metadata.namespace"}}
    assert {"name": "POD_NAMESPACE", "valueFrom": own} in environment


def test_the_definitions_are_the_generated_ones_and_stay_when_the_release_goes() -> None:
    files = sorted((CHART.parents[1] / "crds").glob("*.yaml"))
    kept, loose = render(), render({"crds": {"keep": False}})
    assert len([m for m in kept if m["kind"] == "CustomResourceDefinition"]) == len(files) == 2
    for path in files:
        generated = yaml.safe_load(Path(path).read_text())
        definition = only(kept, "CustomResourceDefinition", path.stem)
        assert definition["spec"] == generated["spec"]
        assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert "annotations" not in only(loose, "CustomResourceDefinition", path.stem)["metadata"]
    assert not [m for m in render({"crds": {"install": False}}) if m["kind"] == "CustomResourceDefinition"]


def test_models_of_the_installation_reach_both_processes_as_a_file():
    model = {"names": ["acme/big"], "attention": "gqa", "attentionHeads": 8, "kvHeads": 1, "layers": 1, "headSize": 64}
    manifests = render({"catalogue": {"models": [model]}})
    (config,) = [each for each in manifests if each["kind"] == "ConfigMap"]
    models, problems = read_entries(yaml.safe_load(config["data"]["models.yaml"]))
    assert problems == []
    assert models[0].names == ["acme/big"]
    for deployment in (each for each in manifests if each["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        container = pod["containers"][0]
        assert {"name": "DCP_CATALOGUE_FILE", "value": "/etc/dcp-catalogue/models.yaml"} in container["env"]
        assert {"name": "catalogue", "mountPath": "/etc/dcp-catalogue", "readOnly": True} in container["volumeMounts"]
        # A missing ConfigMap must not keep a pod from starting.
        volume = {"name": "catalogue", "configMap": {"name": config["metadata"]["name"], "optional": True}}
        assert volume in pod["volumes"]


def test_a_catalogue_of_ones_own_is_mounted_and_none_is_made():
    manifests = render({"catalogue": {"existingConfigMap": "models"}})
    assert not [each for each in manifests if each["kind"] == "ConfigMap"]
    mounted = [
        volume["configMap"]["name"]
        for each in manifests
        if each["kind"] == "Deployment"
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "catalogue"
    ]
    assert mounted == ["models", "models"]


def test_without_models_nothing_is_mounted():
    deployments = [each for each in render() if each["kind"] in ("Deployment", "ConfigMap")]
    assert len(deployments) == 2
    assert "catalogue" not in yaml.safe_dump_all(deployments)


def test_the_webhook_mounts_no_token_and_answers_on_while_it_stops():
    (pod,) = [
        each["spec"]["template"]["spec"]
        for each in render()
        if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("-webhook")
    ]
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] > webhook.read_environment({}).drain_s + 5
