"""The object's status: pure, from what is wanted and what is observed. The clock is given."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.api.status import (
    Condition,
    Resolved,
    ResolvedRole,
    RevisionStatus,
    RoleStatus,
    RolloutStatus,
    Status,
    TransferCheckStatus,
)
from dcp_operator.conditions import AVAILABLE, KV_TRANSFER_VERIFIED, PROGRESSING, READY, View, decide, look
from dcp_operator.observed import Body, Observed, entries
from dcp_operator.reasons import Problem, Reason, Said
from dcp_operator.replicas import wanted
from dcp_operator.rollout import asked_replicas
from dcp_operator.settings import Role, resolve_role
from dcp_operator.target import Target
from dcp_operator.workloads import is_ready, is_scheduled, labels_of, pods_of, revision_states

_MAX_MESSAGE: Final = 4096
#: Conditions whose change is written at once; what else changes may wait for a second.
_HEADLINES: Final = (READY, AVAILABLE, PROGRESSING)
_FIELDS: Final = tuple(str(field.alias or name) for name, field in Status.model_fields.items())


def make_status(
    observed: Observed,
    target: Target,
    failures: Iterable[Problem],
    now: str,
    *,
    transfer: Said | None = None,
    checked: TransferCheckStatus | None = None,
    held: str | None = None,
) -> Body:
    """Return the whole status, JSON-ready.

    `failures` is what could not be written to the cluster, `transfer` what the last check of the KV transfer found,
    `checked` of what and when, and `held` what a rollout's next step waits for. `now` (RFC 3339) becomes the transition
    time of conditions whose status changes; others keep theirs, so equal facts give an equal status.
    """
    view = look(observed, target, goals(observed, target.spec))
    said = decide(view, sorted(failures, key=lambda problem: problem.reason.rank), transfer, held)
    revision, serving = target.revision, view.serving
    status = Status(
        observed_generation=observed.generation,
        conditions=_with_times(said, observed, now),
        current_revision=revision if revision in serving else (serving[-1] if serving else None),
        update_revision=revision,
        prefill=_counts(observed, Role.PREFILL, revision),
        decode=_counts(observed, Role.DECODE, revision),
        router=_counts(observed, names.ROUTER, revision),
        rollout=_rollout(view, held),
        transfer_check=checked,
        resolved=_resolved(target.spec) if target.spec is not None else None,
        parallelism=_parallelism(target.spec) if target.spec is not None else None,
    )
    return status.model_dump(by_alias=True, exclude_none=True)


def condition_of(status: Body, kind: str) -> Mapping[str, Any]:
    """Return one condition of a status, empty where there is none."""
    none: Body = {}
    return next((entry for entry in entries(status, "conditions") if entry.get("type") == kind), none)


def ready_condition(status: Body) -> Mapping[str, Any]:
    """Return the Ready condition of a status, empty where there is none."""
    return condition_of(status, READY)


def is_same(status: Body, stored: Body) -> bool:
    """Whether the stored status says what `status` does. What others wrote beside it makes no difference."""
    if any(status.get(name) != stored.get(name) for name in _FIELDS if name != "conditions"):
        return False
    ours = {entry["type"]: entry for entry in entries(status, "conditions")}
    theirs = {entry.get("type"): entry for entry in entries(stored, "conditions")}
    return all(theirs.get(kind) == entry for kind, entry in ours.items())


def said_by_others(status: Body, stored: Body) -> Body:
    """Return what of a stored status is not in `status`, each as None: fields that somebody else wrote.

    Conditions are left out: whose type isn't ours is another's business.
    """
    result: Body = {}
    for name, value in stored.items():
        if name not in status:
            result[name] = None
        elif isinstance(value, dict) and isinstance(status[name], dict):
            inner = said_by_others(status[name], cast("Body", value))
            result |= {name: inner} if inner else {}
    return result


def may_wait(status: Body, stored: Body) -> bool:
    """Whether no more than progress changed: the headline conditions say the same, of the same generation."""
    if status.get("observedGeneration") != stored.get("observedGeneration"):
        return False
    return all(
        condition_of(status, kind).get("status") == condition_of(stored, kind).get("status") for kind in _HEADLINES
    )


@dataclass(frozen=True, slots=True)
class News:
    """A change that an event tells."""

    reason: Reason
    message: str
    is_warning: bool


def news(stored: Body, status: Body) -> list[News]:
    """Return what the status says that the stored one does not, as events: none where only progress changed.

    The reasons that take nothing but time count as one. Available is left out where Ready has news: one change is one
    event.
    """
    changed: list[News] = []
    for kind in (READY, AVAILABLE, KV_TRANSFER_VERIFIED):
        before, after = condition_of(stored, kind), condition_of(status, kind)
        if not after or _gist(before) == _gist(after) or (kind != READY and not before):
            continue
        reason = Reason(after["reason"])
        if after["status"] == "Unknown" or (kind == AVAILABLE and (changed or before["status"] == after["status"])):
            continue
        is_trouble = after["status"] == "False" and not reason.is_progress and reason is not Reason.PAUSED
        changed.append(News(reason, after["message"], is_trouble))
    return changed


def _gist(condition: Mapping[str, Any]) -> tuple[str, str]:
    """Return what of a condition makes news."""
    reason = condition.get("reason", "")
    in_progress = reason in set(Reason) and Reason(reason).is_progress
    return condition.get("status", ""), "" if in_progress else reason


def goals(observed: Observed, spec: Spec | None) -> dict[str, int] | None:
    """Return the pods wanted of each component, None where the spec can't be read."""
    if spec is None:
        return None
    engines = wanted(spec, asked_replicas(observed, spec)).replicas
    return {**{role.value: engines[role] for role in Role}, names.ROUTER: spec.router.replicas}


def _with_times(said: Mapping[str, Said], observed: Observed, now: str) -> list[Condition]:
    before = {entry.get("type"): entry for entry in entries(observed.status, "conditions")}

    def since(kind: str, status: str) -> str:
        old = before.get(kind, {})
        return old["lastTransitionTime"] if old.get("status") == status else now

    return [
        Condition(
            type=kind,
            status=what.status,
            reason=what.reason,
            message=_cut(what.message),
            last_transition_time=since(kind, what.status),
            observed_generation=observed.generation,
        )
        for kind, what in said.items()
    ]


def _counts(observed: Observed, component: str, revision: str | None) -> RoleStatus:
    pods = pods_of(observed, component)
    return RoleStatus(
        replicas=len(pods),
        ready_replicas=sum(map(is_ready, pods)),
        updated_replicas=sum(labels_of(pod).get(names.LABEL_REVISION) == revision for pod in pods),
        scheduled_replicas=sum(map(is_scheduled, pods)),
    )


def _rollout(view: View, held: str | None) -> RolloutStatus | None:
    """Return how far a rollout is, None where one revision is all there is."""
    if not view.left_over:
        return None
    revisions: list[RevisionStatus] = []
    for revision, capacity in view.capacities.items():
        ready = {component: state.ready for component, state in revision_states(view.observed, revision).items()}
        revisions.append(RevisionStatus(revision=revision, share=f"{int(capacity * 100)}%", **ready))
    return RolloutStatus(revisions=revisions, waiting_for=held)


def _resolved(spec: Spec) -> Resolved:
    def role(which: Role) -> ResolvedRole:
        settings = resolve_role(spec, which)
        return ResolvedRole(
            tensor=settings.tensor,
            decode_context=settings.decode_context,
            block_size=settings.block_size,
            kv_cache_interleave_size=settings.interleave,
            accelerators=settings.accelerators_per_pod,
            max_model_len=settings.max_model_len,
        )

    decode = role(Role.DECODE)
    # A rank keeps every decode_context-th turn of tokens, so as many times more of them fit into the same memory.
    return Resolved(prefill=role(Role.PREFILL), decode=decode, kv_capacity_gain=f"{decode.decode_context}x")


def _parallelism(spec: Spec) -> str:
    def sizes(role: Role) -> str:
        settings = resolve_role(spec, role)
        return f"{settings.tensor}/{settings.decode_context}"

    return f"{sizes(Role.PREFILL)} -> {sizes(Role.DECODE)}"


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "..."
