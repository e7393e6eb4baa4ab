"""What the routers may do in the cluster: see the pods of their namespace, and nothing else.

An object without routers has none of it.
"""

from dcp_operator import names
from dcp_operator.build.objects import Context, Manifest, metadata

_RBAC = "rbac.authorization.k8s.io"


def build_service_account(context: Context) -> Manifest | None:
    """Return the routers' ServiceAccount."""
    if context.spec.router.replicas == 0:
        return None
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(context, names.router_account(context.name), names.ROUTER),
        "automountServiceAccountToken": True,
    }


def build_role(context: Context) -> Manifest | None:
    """Return the Role: read access to pods, which is what the router's discovery watches."""
    if context.spec.router.replicas == 0:
        return None
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": metadata(context, names.router_account(context.name), names.ROUTER),
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
    }


def build_role_binding(context: Context) -> Manifest | None:
    """Return the RoleBinding that gives the Role to the ServiceAccount."""
    if context.spec.router.replicas == 0:
        return None
    account = names.router_account(context.name)
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata(context, account, names.ROUTER),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": context.namespace}],
    }
