"""Who may connect to the object's pods, as NetworkPolicies: one for all engines, one for all routers.

    to       from                                           on
    engine   engines of the object                          every port: Mooncake and vLLM open random ones
    engine   routers of the object, namespaces named        HTTP
    engine   the operator                                   HTTP, and the connector's first port
    router   own namespace, namespaces named, the operator  HTTP and metrics, if namespaces are named; else everyone

An object without routers has one of its user's own, whose labels nobody knows and which asks the bootstrap servers of
both Mooncake connectors for engines' identities. So its engines are open as a router is, and there too:

    engine   own namespace, namespaces named, the operator  HTTP, and a bootstrap server's port

A cluster's network has to enforce them, and none can for pods on their node's network: these have the node's address,
which no label selects. An object with such pods gets no policy for its engines, which would cut them off from each
other.
"""

from dcp_operator import names
from dcp_operator.build.merge import part
from dcp_operator.build.objects import Context, Manifest, metadata
from dcp_operator.build.wiring import profile_of
from dcp_operator.settings import Role, role_spec

#: Label that Kubernetes gives every namespace: its name.
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
#: Label of the controller's pods, given by the chart.
_CONTROLLER = {"app.kubernetes.io/component": "controller"}
#: All pods of engines, those beside the leader of a group too: they are of one mind, on ports that nobody knows before.
_ENGINES = tuple(value for role in Role for value in (role.value, names.worker_component(role)))


def build_engine_policy(context: Context) -> Manifest | None:
    """Return the policy of the engines of all revisions; None where it is turned off, or could not tell friends."""
    spec = context.spec
    if not spec.network_policy.enabled or _on_host_network(context):
        return None
    is_own_router = spec.router.replicas == 0
    callers = [
        {"podSelector": {} if is_own_router else {"matchLabels": names.selector(context.name, names.ROUTER)}},
        *_operator(context),
        *_namespaces(spec.network_policy.allowed_namespaces or []),
    ]
    # NIXL's side channel speaks no HTTP: only engines have anything to ask there.
    asks_bootstrap = is_own_router and profile_of(spec).ready_path is not None
    on_bootstrap = callers if asks_bootstrap else _operator(context)
    rules: list[Manifest] = [
        {"from": [{"podSelector": _engines(context)}]},
        {"from": callers, "ports": _ports(names.PORT_NAME_HTTP)},
    ]
    if on_bootstrap:
        rules.append({"from": on_bootstrap, "ports": _ports(names.PORT_NAME_BOOTSTRAP)})
    return _policy(context, names.engine_policy(context.name), _engines(context), rules)


def build_router_policy(context: Context) -> Manifest | None:
    """Return the policy of the routers of all revisions; None without one, without routers, or if everyone may call."""
    stated = context.spec.network_policy
    if not stated.enabled or stated.allowed_namespaces is None or context.spec.router.replicas == 0:
        return None
    callers: list[Manifest] = [{"podSelector": {}}, *_operator(context), *_namespaces(stated.allowed_namespaces)]
    rules: list[Manifest] = [{"from": callers, "ports": _ports(names.PORT_NAME_HTTP, names.PORT_NAME_METRICS)}]
    selector = {"matchLabels": names.selector(context.name, names.ROUTER)}
    return _policy(context, names.router_policy(context.name), selector, rules)


def _policy(context: Context, name: str, selector: Manifest, rules: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(context, name),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": rules},
    }


def _engines(context: Context) -> Manifest:
    return {
        "matchLabels": {names.LABEL_NAME: context.name},
        "matchExpressions": [{"key": names.LABEL_ROLE, "operator": "In", "values": list(_ENGINES)}],
    }


def _operator(context: Context) -> list[Manifest]:
    """Return the operator's pods; none where it runs outside of the cluster, as `dcpctl render` does."""
    if context.operator_namespace is None:
        return []
    where = {"matchLabels": {_NAMESPACE_NAME: context.operator_namespace}}
    return [{"namespaceSelector": where, "podSelector": {"matchLabels": _CONTROLLER}}]


def _namespaces(allowed: list[str]) -> list[Manifest]:
    return [{"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: name}}} for name in dict.fromkeys(allowed)]


def _ports(*port_names: str) -> list[Manifest]:
    """Return ports by their names in the pods: numbers may differ between revisions."""
    return [{"port": name, "protocol": "TCP"} for name in port_names]


def _on_host_network(context: Context) -> bool:
    """Whether pods of the object are on their node's network, by a role's field or by a template."""
    spec = context.spec
    templates = {"prefill": spec.prefill.template, "decode": spec.decode.template, "router": spec.router.template}
    pods = [part(template, "spec", f"spec.{component}.template") for component, template in templates.items()]
    return any(role_spec(spec, role).host_network for role in Role) or any(pod.get("hostNetwork") for pod in pods)
