"""What the scalers of an object say: how many engines there are, whose pods count, and what keeps their number."""

from collections.abc import Mapping

from dcp_operator import names
from dcp_operator.api.scaler import BOUNDED, ScalerStatus
from dcp_operator.api.spec import Spec
from dcp_operator.api.status import Condition
from dcp_operator.observed import Body, Child, Observed, entries, section
from dcp_operator.replicas import Bound, WantedRole, wanted
from dcp_operator.rollout import asked_replicas
from dcp_operator.settings import Role, role_spec
from dcp_operator.workloads import pods_of


def changed_scalers(observed: Observed, spec: Spec, now: str) -> list[tuple[Child, Body]]:
    """Return the scalers whose status is to be written, each with it. `now` is RFC 3339.

    A scaler that is made in this pass gets its status in the next, which its own event begins.
    """
    said = wanted(spec, asked_replicas(observed, spec))
    result: list[tuple[Child, Body]] = []
    for role in Role:
        scaler = observed.scaler(role)
        if scaler is not None and role_spec(spec, role).scaling is not None:
            before = section(scaler.body, "status")
            after = _status(observed, role, said.of(role), scaler.body, now)
            if after != before:
                result.append((scaler, after))
    return result


def pod_selector(name: str, role: Role) -> str:
    """Return the label selector of a role's engines over all revisions: one pod for each, of a group the leader."""
    return ",".join(f"{key}={value}" for key, value in sorted(names.selector(name, role).items()))


def _status(observed: Observed, role: Role, said: WantedRole, scaler: Body, now: str) -> Body:
    verdict = "False" if said.bound is Bound.WITHIN else "True"
    none: Body = {}
    before = next((entry for entry in entries(scaler, "status", "conditions") if entry.get("type") == BOUNDED), none)
    condition = Condition(
        type=BOUNDED,
        status=verdict,
        reason=said.bound,
        message=said.message,
        last_transition_time=_since(before, verdict, now),
        observed_generation=scaler["metadata"].get("generation"),
    )
    status = ScalerStatus(
        replicas=len(pods_of(observed, role)), selector=pod_selector(observed.key.name, role), conditions=[condition]
    )
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def _since(before: Mapping[str, str], verdict: str, now: str) -> str:
    """Return since when the condition has its status."""
    return before["lastTransitionTime"] if before.get("status") == verdict else now
