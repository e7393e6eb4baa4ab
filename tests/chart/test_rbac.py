"""What the chart allows: the controller exactly what it does, the webhook nothing."""

from typing import Any

import pytest

from tests.support.helm import Manifest, render

#: (API group, resource) -> verbs. A right that isn't here is one too many, a missing one stops the operator.
EXPECTED = {
    ("dcpdisagg.io", "dcpdisaggdeployments"): {"get", "list", "watch"},
    ("dcpdisagg.io", "dcpdisaggdeployments/status"): {"get", "patch"},
    ("dcpdisagg.io", "dcpdisaggdeployments/finalizers"): {"update"},
    ("dcpdisagg.io", "dcpdisaggrolescalers"): {"get", "list", "watch", "create", "patch", "delete"},
    ("dcpdisagg.io", "dcpdisaggrolescalers/status"): {"patch"},
    ("apps", "deployments"): {"get", "list", "watch", "create", "patch", "delete"},
    ("apps", "deployments/scale"): {"patch"},
    ("apps", "controllerrevisions"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "services"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "serviceaccounts"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "secrets"): {"get", "list", "watch", "create", "patch", "delete"},
    ("rbac.authorization.k8s.io", "roles"): {"get", "list", "watch", "create", "patch", "delete"},
    ("rbac.authorization.k8s.io", "rolebindings"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "pods"): {"get", "list", "watch", "patch", "delete"},
    ("leaderworkerset.x-k8s.io", "leaderworkersets"): {"get", "list", "watch", "create", "patch", "delete"},
    ("leaderworkerset.x-k8s.io", "leaderworkersets/scale"): {"patch"},
    ("", "pods/log"): {"get"},
    ("batch", "jobs"): {"get", "list", "watch", "create", "patch", "delete"},
    ("networking.k8s.io", "networkpolicies"): {"get", "list", "watch", "create", "patch", "delete"},
    ("policy", "poddisruptionbudgets"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "events"): {"create", "patch"},
}


def rights(role: Manifest) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        assert set(rule) == {"apiGroups", "resources", "verbs"}, "no rule for URLs or single names is expected"
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [m for m in manifests if m["kind"] in kinds]


@pytest.mark.parametrize(
    ("values", "kind", "namespaces"),
    [
        ({}, "ClusterRole", [None]),
        ({"watchNamespaces": ["models", "research"]}, "Role", ["models", "research"]),
    ],
    ids=["every namespace", "two namespaces"],
)
def test_the_controller_may_do_exactly_what_it_does(
    values: dict[str, Any], kind: str, namespaces: list[str | None]
) -> None:
    manifests = render(values)
    roles = of_kind(manifests, "ClusterRole", "Role")
    assert [(role["kind"], role["metadata"].get("namespace")) for role in roles] == [(kind, n) for n in namespaces]
    for role in roles:
        assert rights(role) == EXPECTED


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["models"]}], ids=["every namespace", "one namespace"])
def test_no_right_is_a_wildcard_or_a_way_to_more_rights(values: dict[str, Any]) -> None:
    for role in of_kind(render(values), "ClusterRole", "Role"):
        for (group, resource), verbs in rights(role).items():
            assert "*" not in {group, resource} | verbs
            assert not verbs & {"escalate", "bind", "impersonate", "deletecollection"}


def test_every_binding_gives_a_role_of_the_release_to_the_controller_alone() -> None:
    for values in ({}, {"watchNamespaces": ["models", "research"]}):
        manifests = render(values)
        roles = {
            (r["kind"], r["metadata"].get("namespace"), r["metadata"]["name"])
            for r in of_kind(manifests, "Role", "ClusterRole")
        }
        bindings = of_kind(manifests, "RoleBinding", "ClusterRoleBinding")
        bound = {(b["roleRef"]["kind"], b["metadata"].get("namespace"), b["roleRef"]["name"]) for b in bindings}
        assert bound == roles
        for binding in bindings:
            assert binding["subjects"] == [
                {"kind": "ServiceAccount", "name": "rel-dcp-disagg-controller", "namespace": "home"}
            ]
