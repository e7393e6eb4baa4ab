"""How many engines are asked for by role, where that number is left to an autoscaler, and what to do without it.

A scaler says the number. Where it is missing (not made yet, deleted, or its name is another's) what runs tells it. One
revision alone has as many engines as were asked for. Of several the sum has up to the surge too much, and what is
computed from such a sum would add the surge to itself again and again: so no rollout moves until the scaler is there.
Meanwhile, and for the scaler that is made, R lies between the least number whose surge explains the sum, and the sum:
a rollout holds sum <= R + surge. Within that it is the engines that are ready: those of the surge that still start, the
only state in which a rollout waits, are not counted. Half-way, 2 + 2 ready engines are 4. Never fewer than the largest
revision has, as none has more than R. So it is R, but for engines that died meanwhile (fewer by no more than the surge)
and those of the surge that became ready while nothing moved (more by no more than that). An autoscaler corrects both.
"""

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.kinds import SCALER, Ref
from dcp_operator.observed import Child, Observed
from dcp_operator.reasons import Problem, Reason
from dcp_operator.rollout.shares import Pair, bounds_of
from dcp_operator.settings import Role, role_spec
from dcp_operator.workloads import is_ready, pods_of


def asked_replicas(observed: Observed, spec: Spec) -> dict[Role, int]:
    """Return how many engines are asked for by role, as scalers say it, or else as what runs tells."""
    result: dict[Role, int] = {}
    for role in Role:
        scaler, engines = observed.scaler(role), _engines(observed, role)
        if scaler is not None:
            result[role] = scaler.body["spec"]["replicas"]
        elif engines:
            result[role] = _told_by(observed, spec, role, engines)
    return result


def missing_scaler(observed: Observed, spec: Spec, target: str) -> Problem | None:
    """Return why a rollout to `target` may not move; None where it may.

    It may not while the scaler of a role that states `scaling` is missing and an older revision has engines.
    """
    for role in Role:
        if role_spec(spec, role).scaling is None or observed.scaler(role) is not None:
            continue
        old = [
            child.revision or "" for child in _engines(observed, role) if child.revision != target and _asks_for(child)
        ]
        if old:
            return Problem(Reason.ROLLING_OUT, _words(observed, role, target, old))
    return None


def _engines(observed: Observed, role: Role) -> list[Child]:
    """Return the workloads of a role: those that ask for engines and don't go, if there are any.

    Of a revision that goes, the routers go first: its engines may drain for long beside all that are wanted.
    """
    found = [child for child in observed.workloads() if child.component == role]
    running = [child for child in found if _asks_for(child)]
    staying = [child for child in running if _has_routers(observed, child.revision or "")]
    return staying or running or found


def _has_routers(observed: Observed, revision: str) -> bool:
    routers = observed.workload(names.ROUTER, revision)
    return routers is not None and not routers.is_deleting


def _told_by(observed: Observed, spec: Spec, role: Role, engines: list[Child]) -> int:
    """Return how many engines were asked for, by the workloads of a role."""
    counts = [_asks_for(child) for child in engines]
    total = sum(counts)
    if len(counts) == 1:
        return total
    ready = sum(min(count, _ready(observed, role, child)) for count, child in zip(counts, engines, strict=True))
    least = next(count for count in range(total + 1) if count + _surge(spec, role, count) >= total)
    return max(least, *counts, ready)


def _surge(spec: Spec, role: Role, count: int) -> int:
    surge = bounds_of(Pair(count, count), spec.rollout_strategy).surge
    return surge.prefill if role is Role.PREFILL else surge.decode


def _ready(observed: Observed, role: Role, workload: Child) -> int:
    return sum(map(is_ready, pods_of(observed, role, workload.revision)))


def _asks_for(workload: Child) -> int:
    return workload.body["spec"].get("replicas", 1)


def _words(observed: Observed, role: Role, target: str, old: list[str]) -> str:
    """Return why nothing moves, and what to do."""
    name = names.scaler(observed.key.name, role)
    found = observed.children.get(Ref(SCALER.kind, name))
    if found is None:
        why = "is not there: it is made as soon as no other has its name and nothing refuses it"
    elif found.belongs_to(observed.uid):
        why = "is being deleted, and made again when that has ended: see its finalizers"
    else:
        why = "is another's: delete it, or choose another name than this object's"
    look = f"kubectl -n {observed.key.namespace} get {SCALER.plural} {name} -o yaml"
    return (
        f"revision {target} waits beside {' and '.join(old)}: spec.{role}.scaling leaves the number of {role} engines "
        f"to {SCALER.kind} {name}, which {why} ({look})"
    )
