"""Workloads that may exist and can't be seen: what isn't seen is not taken for what isn't there."""

from dcp_operator.api.spec import Spec
from dcp_operator.groups import group_of
from dcp_operator.kinds import LEADER_WORKER_SET, WORKLOAD_KINDS
from dcp_operator.observed import Observed
from dcp_operator.reasons import Problem, Reason
from dcp_operator.settings import Role, role_spec


def unseen_workloads(observed: Observed, spec: Spec) -> Problem | None:
    """Return why workloads of an object can't be seen, None where it has and wants none of such a kind."""
    for kind in WORKLOAD_KINDS:
        why = observed.unavailable.get(kind)
        if why is not None and (_wants(spec, kind) or _has(observed, kind)):
            return Problem(Reason.GROUPS_UNAVAILABLE, why)
    return None


def has_pods_of_groups(observed: Observed) -> bool:
    """Whether a pod of an object belongs to a LeaderWorkerSet, be that seen or not."""
    return any(group_of(pod) is not None for pod in observed.pods)


def _wants(spec: Spec, kind: str) -> bool:
    return kind == LEADER_WORKER_SET.kind and any(role_spec(spec, role).multinode is not None for role in Role)


def _has(observed: Observed, kind: str) -> bool:
    if any(child.ref.kind == kind for child in observed.workloads()):
        return True
    return kind == LEADER_WORKER_SET.kind and has_pods_of_groups(observed)
