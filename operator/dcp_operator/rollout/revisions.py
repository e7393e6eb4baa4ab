"""Which revisions there are, which serve, and whether the routers of one are gone.

Of a revision that goes, the routers go first and the engines only after them: a router that still has requests finds
its engines.
"""

from collections.abc import Mapping

from dcp_operator import names
from dcp_operator.observed import Body, Child, Observed, section
from dcp_operator.rollout.situation import is_users_router
from dcp_operator.settings import Role
from dcp_operator.workloads import ComponentState, is_ready, revision_states


def revisions(observed: Observed) -> list[str]:
    """Return the revisions that have a workload, oldest first."""
    born: dict[str, tuple[str, str]] = {}
    for child in observed.workloads():
        revision = child.revision
        if revision is not None and not child.is_deleting:
            age = (child.body["metadata"].get("creationTimestamp", ""), revision)
            born[revision] = min(born.get(revision, age), age)
    return sorted(born, key=lambda revision: born[revision])


def serving_revisions(observed: Observed, routers: int | None, target: str | None) -> list[str]:
    """Return the revisions that answer requests, oldest first.

    `routers` is spec.router.replicas and `target` the spec's revision; None both where no spec is acted upon.
    """

    def serves(revision: str) -> bool:
        states = revision_states(observed, revision)
        return all(states[role].serves for role in Role) and is_routed(states, routers, is_target=revision == target)

    return [revision for revision in revisions(observed) if serves(revision)]


def is_routed(states: Mapping[str, ComponentState], routers: int | None, *, is_target: bool) -> bool:
    """Whether requests reach a revision's engines: through a ready router of its own, or the user's."""
    router = states[names.ROUTER]
    return router.serves or is_users_router(routers, router.wanted if router.exists else None, is_target=is_target)


def is_router(workload: Child) -> bool:
    """Whether a Deployment is that of a revision's routers."""
    return section(workload.body, "spec", "selector", "matchLabels").get(names.LABEL_ROLE) == names.ROUTER


def routers_remain(observed: Observed, revision: str, now: str) -> bool:
    """Whether a router of a revision still exists, or a pod of one that may still have requests.

    `now` is RFC 3339, as Kubernetes writes times.
    """
    wanted = {names.LABEL_ROLE: names.ROUTER, names.LABEL_REVISION: revision}
    in_pods = any(
        wanted.items() <= section(pod, "metadata", "labels").items() and not _is_over(pod, now) for pod in observed.pods
    )
    return in_pods or any(is_router(child) and child.revision == revision for child in observed.workloads())


def _is_over(pod: Body, now: str) -> bool:
    """Whether a pod has no requests any more.

    It has ended, or its grace period has: its deletionTimestamp is when that ends, and only a node that is dead keeps
    the pod for longer. A pod that drains is not ready either, so readiness alone says nothing.
    """
    if section(pod, "status").get("phase") in ("Succeeded", "Failed"):
        return True
    ends = pod["metadata"].get("deletionTimestamp")
    return ends is not None and ends < now and not is_ready(pod)
