"""PodDisruptionBudgets and NetworkPolicies: when there is one, and who gets through."""

import pytest

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.build import Context, render_context
from dcp_operator.settings import Role
from tests.support.network_policies import End, allows
from tests.support.objects import spec

OPERATOR_NAMESPACE = "dcp-system"
RANDOM_PORT = 15123


def rendered(*, operator_namespace: str | None = OPERATOR_NAMESPACE, **changes) -> list[dict]:
    found = Spec.model_validate(spec(**changes))
    return render_context(Context("chat", "models", found, "acme/operator:1", operator_namespace=operator_namespace))


def of_kind(manifests: list[dict], kind: str) -> dict[str, dict]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def role_with(**fields) -> dict:
    return {"parallelism": {"tensor": 1}, "blockSize": 32, **fields}


class TestDisruptionBudget:
    def test_a_role_of_several_engines_has_one_over_all_its_revisions(self):
        (budget,) = of_kind(rendered(prefill=role_with(replicas=3)), "PodDisruptionBudget").values()
        assert budget["metadata"]["name"] == "chat-prefill"
        assert budget["spec"] == {
            "maxUnavailable": 1,
            "selector": {"matchLabels": {names.LABEL_NAME: "chat", names.LABEL_ROLE: "prefill"}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }

    def test_its_number_or_percentage_is_the_users(self):
        stated = role_with(replicas=4, disruptionBudget={"maxUnavailable": "50%"})
        (budget,) = of_kind(rendered(prefill=stated), "PodDisruptionBudget").values()
        assert budget["spec"]["maxUnavailable"] == "50%"

    @pytest.mark.parametrize(
        "role",
        [
            role_with(replicas=1),
            role_with(replicas=0),
            role_with(scaling={"minReplicas": 1, "maxReplicas": 4}),
            role_with(replicas=3, disruptionBudget={"enabled": False}),
        ],
        ids=["one engine", "none", "one of an autoscaler", "turned off"],
    )
    def test_there_is_none_where_it_would_protect_nothing_or_is_turned_off(self, role: dict):
        assert of_kind(rendered(prefill=role), "PodDisruptionBudget") == {}


def ends() -> dict[str, End]:
    """Everyone who might connect: pods by what they are, with the labels that they really have."""
    manifests = rendered()
    result = {
        "prometheus": End("monitoring", {"app": "prometheus"}),
        "neighbour": End("models", {"app": "web"}),
        "stranger": End("other", {"app": "web"}),
        "operator": End(OPERATOR_NAMESPACE, {"app.kubernetes.io/component": "controller"}),
        "impostor": End("other", {"app.kubernetes.io/component": "controller"}),
        "operators neighbour": End(OPERATOR_NAMESPACE, {"app": "web"}),
        "outside": End(None),
    }
    for deployment in of_kind(manifests, "Deployment").values():
        template = deployment["spec"]["template"]
        labels = template["metadata"]["labels"]
        ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        result[labels[names.LABEL_ROLE]] = End("models", labels, ports)
        other_object = {**labels, names.LABEL_NAME: "other"}
        result[f"{labels[names.LABEL_ROLE]} of another object"] = End("models", other_object, ports)
        result[f"{labels[names.LABEL_ROLE]} of another namespace"] = End("other", labels, ports)
        earlier = {**labels, names.LABEL_REVISION: "0badcafe"}
        result[f"{labels[names.LABEL_ROLE]} of another revision"] = End("models", earlier, ports)
    return result


def callers(policies: list[dict], target: str, port: int) -> set[str]:
    everyone = ends()
    return {name for name, source in everyone.items() if allows(policies, source, everyone[target], port)}


OWN_ENGINES = {"prefill", "decode", "prefill of another revision", "decode of another revision"}
OWN_ROUTERS = {"router", "router of another revision"}
#: Pods of the object's namespace that aren't the object's.
NEIGHBOURS = {"neighbour", *(f"{component} of another object" for component in names.COMPONENTS)}

ENGINE_CALLERS = {
    # by what is allowed: who gets to HTTP, to the connector's port, to any other port
    None: (OWN_ENGINES | OWN_ROUTERS | {"operator"}, OWN_ENGINES | {"operator"}, OWN_ENGINES),
    ("monitoring",): (
        OWN_ENGINES | OWN_ROUTERS | {"operator", "prometheus"},
        OWN_ENGINES | {"operator"},
        OWN_ENGINES,
    ),
}


@pytest.mark.parametrize("target", ["prefill", "decode", "prefill of another revision"])
@pytest.mark.parametrize("allowed", ENGINE_CALLERS, ids=str)
def test_an_engine_is_reached_by_these_and_nobody_else(allowed: tuple[str, ...] | None, target: str):
    stated = {} if allowed is None else {"allowedNamespaces": list(allowed)}
    policies = list(of_kind(rendered(networkPolicy=stated), "NetworkPolicy").values())
    for port, expected in zip((8000, 8998, RANDOM_PORT), ENGINE_CALLERS[allowed], strict=True):
        assert callers(policies, target, port) == expected


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, NEIGHBOURS | OWN_ENGINES | OWN_ROUTERS | {"operator"}),
        ({"allowedNamespaces": ["monitoring"]}, NEIGHBOURS | OWN_ENGINES | OWN_ROUTERS | {"operator", "prometheus"}),
    ],
    ids=["own namespace", "own and another namespace"],
)
@pytest.mark.parametrize("target", list(Role))
def test_without_routers_a_router_of_the_users_own_reaches_engines_and_their_bootstrap_servers(
    target: Role, stated: dict, expected: set[str]
):
    policies = list(of_kind(rendered(router={"replicas": 0}, networkPolicy=stated), "NetworkPolicy").values())
    for port in (8000, 8998):
        assert callers(policies, target, port) == expected
    assert callers(policies, target, RANDOM_PORT) == OWN_ENGINES


def test_a_side_channel_that_is_no_bootstrap_server_stays_closed_to_a_router_of_the_users_own():
    nixl = {"type": "nixl", "protocol": "tcp"}
    manifests = rendered(router={"replicas": 0}, kvConnector=nixl, networkPolicy={"allowedNamespaces": ["monitoring"]})
    policies = list(of_kind(manifests, "NetworkPolicy").values())
    assert callers(policies, "prefill", 8998) == OWN_ENGINES | {"operator"}
    assert "neighbour" in callers(policies, "prefill", 8000)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, set(ends())),
        ({"allowedNamespaces": []}, NEIGHBOURS | OWN_ENGINES | OWN_ROUTERS | {"operator"}),
        ({"allowedNamespaces": ["monitoring"]}, NEIGHBOURS | OWN_ENGINES | OWN_ROUTERS | {"operator", "prometheus"}),
    ],
    ids=["everyone", "own namespace", "own and another namespace"],
)
def test_a_router_is_reached_by_those_that_are_allowed(stated: dict, expected: set[str]):
    policies = list(of_kind(rendered(networkPolicy=stated), "NetworkPolicy").values())
    for port in (names.PORT_ROUTER, names.PORT_ROUTER_METRICS):
        assert callers(policies, "router", port) == expected


def test_pods_of_nobodys_business_are_left_alone():
    policies = list(of_kind(rendered(networkPolicy={"allowedNamespaces": []}), "NetworkPolicy").values())
    for target in ("neighbour", "prefill of another object", "prefill of another namespace"):
        assert callers(policies, target, 8000) == set(ends())


def test_turned_off_there_is_none():
    assert of_kind(rendered(networkPolicy={"enabled": False, "allowedNamespaces": ["a"]}), "NetworkPolicy") == {}


def test_without_routers_an_object_has_nothing_of_theirs():
    manifests = rendered(router={"replicas": 0}, networkPolicy={"allowedNamespaces": []})
    for kind in ("Service", "ServiceAccount", "Role", "RoleBinding"):
        assert of_kind(manifests, kind) == {}
    assert list(of_kind(manifests, "NetworkPolicy")) == ["chat-engines"]
    replicas = {name: body["spec"]["replicas"] for name, body in of_kind(manifests, "Deployment").items()}
    assert [count for name, count in replicas.items() if "-router-" in name] == [0]


def test_an_operator_outside_of_the_cluster_is_not_let_in_and_nobody_in_its_place():
    policies = list(of_kind(rendered(operator_namespace=None), "NetworkPolicy").values())
    assert callers(policies, "prefill", 8998) == OWN_ENGINES


@pytest.mark.parametrize(
    "changes",
    [
        {"decode": {"replicas": 1, "parallelism": {"tensor": 1}, "blockSize": 32, "hostNetwork": True}},
        {"prefill": role_with(replicas=1, template={"spec": {"hostNetwork": True}})},
        {"router": {"template": {"spec": {"hostNetwork": True}}}},
    ],
    ids=["the field of a role", "a role's template", "the router's template"],
)
def test_engines_have_none_where_a_pod_of_the_object_has_its_nodes_address(changes: dict):
    policies = of_kind(rendered(networkPolicy={"allowedNamespaces": []}, **changes), "NetworkPolicy")
    assert list(policies) == ["chat-routers"]


def test_protection_is_there_before_the_pods_and_goes_after_them():
    kinds = [manifest["kind"] for manifest in rendered(prefill=role_with(replicas=2))]
    first_pods = kinds.index("Deployment")
    assert {"NetworkPolicy", "PodDisruptionBudget"} <= set(kinds[:first_pods])


def test_names_of_protection_are_no_longer_than_those_of_workloads():
    budgets = [names.disruption_budget("", role) for role in Role]
    for name in (*budgets, names.engine_policy(""), names.router_policy("")):
        assert len(name) <= names.longest_suffix()
