"""The PodDisruptionBudget of a role: how many of its engines may be evicted at once, when nodes are drained."""

from dcp_operator import names
from dcp_operator.build.objects import Context, Manifest, metadata
from dcp_operator.settings import Role, role_spec


def build_disruption_budget(context: Context, role: Role, engines: int) -> Manifest | None:
    """Return a role's budget; `engines` are those wanted. None where it is turned off, or where it would protect none.

    A budget for one engine would either forbid every drain of its node or allow what it is there to prevent.
    It counts the pods of all revisions, and those of a multi-node engine one by one: another engine's pod is evicted
    only when the first engine is whole again. Pods that are not ready may always go, or a broken engine would keep its
    node from being drained.
    """
    stated = role_spec(context.spec, role).disruption_budget
    if not stated.enabled or engines <= 1:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(context, names.disruption_budget(context.name, role), role),
        "spec": {
            "maxUnavailable": stated.max_unavailable,
            "selector": _pods(context, role),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _pods(context: Context, role: Role) -> Manifest:
    """Return the selector of a role's pods: an engine that spans several is interrupted by the loss of any of them."""
    if role_spec(context.spec, role).multinode is None:
        return {"matchLabels": names.selector(context.name, role)}
    components = {"key": names.LABEL_ROLE, "operator": "In", "values": [role.value, names.worker_component(role)]}
    return {"matchLabels": {names.LABEL_NAME: context.name}, "matchExpressions": [components]}
