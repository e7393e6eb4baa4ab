"""Which revisions may go: the new one is made beside the old, and the old goes when the new one has taken over.

Of a revision that goes, the routers go first and the engines only after them: a router that still has requests finds
its engines.
"""

from dcp_operator import names
from dcp_operator.observed import Body, Child, Observed, section
from dcp_operator.workloads import has_engines, is_ready, revision_is_complete, revision_serves, revision_states


def revisions(observed: Observed) -> list[str]:
    """Return the revisions that have a workload, oldest first."""
    born: dict[str, tuple[str, str]] = {}
    for child in observed.workloads():
        revision = child.revision
        if revision is not None and not child.is_deleting:
            age = (child.body["metadata"].get("creationTimestamp", ""), revision)
            born[revision] = min(born.get(revision, age), age)
    return sorted(born, key=lambda revision: born[revision])


def serving_revisions(observed: Observed) -> list[str]:
    """Return the revisions that answer requests, oldest first."""
    return [revision for revision in revisions(observed) if revision_serves(revision_states(observed, revision))]


def retired_revisions(observed: Observed, update: str) -> dict[str, str]:
    """Return the revisions whose workloads are to be deleted, each with why.

    All but `update` once that one is complete. Before, only what has not one ready engine of each role, while any
    revision serves, `update` included: it would hold the accelerators that the update needs. A router that is away for
    a moment makes no difference, and the last revision that could serve again is never given up.
    """
    old = [revision for revision in revisions(observed) if revision != update]
    if revision_is_complete(revision_states(observed, update)):
        return dict.fromkeys(old, f"replaced by revision {update}")
    if not serving_revisions(observed):
        return {}
    idle = [revision for revision in old if not has_engines(revision_states(observed, revision))]
    return dict.fromkeys(idle, "does not serve, and another revision does")


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
