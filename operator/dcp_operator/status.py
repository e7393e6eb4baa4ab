"""The object's status: pure, from what is wanted and what is observed. The clock is given."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dcp_operator import names
from dcp_operator.api.findings import Finding
from dcp_operator.api.spec import Spec
from dcp_operator.api.status import Condition, Resolved, ResolvedRole, RoleStatus, Status
from dcp_operator.connectors import PROFILES
from dcp_operator.observed import Body, Observed, entries
from dcp_operator.problems import component_problem
from dcp_operator.reasons import Problem, Reason
from dcp_operator.rollout import serving_revisions
from dcp_operator.settings import Role, resolve_role
from dcp_operator.target import Target
from dcp_operator.workloads import (
    ComponentState,
    is_ready,
    labels_of,
    pods_of,
    revision_is_complete,
    revision_states,
)

READY = "Ready"
PROGRESSING = "Progressing"
CONFIG_COMPATIBLE = "ConfigCompatible"
_COMPONENT_CONDITIONS = {
    Role.PREFILL.value: "PrefillReady",
    Role.DECODE.value: "DecodeReady",
    names.ROUTER: "RouterReady",
}

#: Rule whose warning says that the model's shape is not known, so that the rules about it were not asked.
UNKNOWN_MODEL_RULE = "unknown-model"
_MAX_MESSAGE = 4096

Verdict = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class _Said:
    status: Verdict
    reason: Reason
    message: str


def make_status(observed: Observed, target: Target, failures: Iterable[Problem], now: str) -> Body:
    """Return the whole status, JSON-ready.

    `failures` is what could not be written to the cluster. `now` (RFC 3339) becomes the transition time of conditions
    whose status changes; others keep theirs, so equal facts give an equal status.
    """
    said = _conditions(observed, target, sorted(failures, key=lambda problem: problem.reason.rank))
    revision = target.revision
    serving = serving_revisions(observed)
    current = revision if revision in serving else (serving[-1] if serving else None)
    status = Status(
        observed_generation=observed.generation,
        conditions=_with_times(said, observed, now),
        current_revision=current,
        update_revision=revision or observed.status.get("updateRevision"),
        prefill=_counts(observed, Role.PREFILL, revision),
        decode=_counts(observed, Role.DECODE, revision),
        router=_counts(observed, names.ROUTER, revision),
        resolved=_resolved(target.spec) if target.spec is not None else None,
        parallelism=_parallelism(target.spec) if target.spec is not None else None,
    )
    return status.model_dump(by_alias=True, exclude_none=True)


def ready_condition(status: Body) -> Mapping[str, str]:
    """Return the Ready condition of a status, empty where there is none."""
    none: Body = {}
    return next((entry for entry in entries(status, "conditions") if entry.get("type") == READY), none)


def _conditions(observed: Observed, target: Target, failures: list[Problem]) -> dict[str, _Said]:
    """Return what every condition says, by type, in the order in which they are listed."""
    # A refused spec says nothing about pods; what runs is the last revision that was accepted.
    serving = serving_revisions(observed)
    revision = target.revision or (serving[-1] if serving else None)
    states = revision_states(observed, revision) if revision is not None else {}
    components = {component: _component(states.get(component), component, observed) for component in names.COMPONENTS}
    router = states.get(names.ROUTER)
    if target.spec is not None and router is not None and router.exists and router.wanted == 0:
        components[names.ROUTER] = _own_router(target.spec) or components[names.ROUTER]
    engines_run = target.revision is not None and all(components[role].status == "True" for role in Role)
    config = _config(target, engines_run=engines_run)
    problems = [Problem(said.reason, said.message) for said in (config,) if said.status == "False"]
    problems += failures
    problems += [Problem(said.reason, said.message) for said in components.values() if said.status == "False"]
    worst = min(problems, key=lambda problem: problem.reason.rank, default=None)
    is_complete = bool(states) and revision_is_complete(states)
    ready = _ready(worst, is_complete, target.revision, serving)
    return {
        READY: ready,
        PROGRESSING: _progressing(worst, is_complete, target.revision),
        **{_COMPONENT_CONDITIONS[component]: said for component, said in components.items()},
        CONFIG_COMPATIBLE: config,
    }


def _ready(worst: Problem | None, is_complete: bool, revision: str | None, serving: list[str]) -> _Said:
    if worst is None and is_complete and revision is not None:
        return _Said("True", Reason.SERVING, f"all pods of revision {revision} are ready and requests are answered")
    reason, message = (worst.reason, worst.message) if worst else (Reason.ROLLING_OUT, "pods are being made")
    others = [name for name in serving if name != revision]
    if others:
        message = f"{message}; revision {others[-1]} keeps serving"
    return _Said("False", reason, message)


def _progressing(worst: Problem | None, is_complete: bool, revision: str | None) -> _Said:
    if worst is None and is_complete:
        return _Said("False", Reason.ROLLED_OUT, f"revision {revision} is rolled out; nothing is left to do")
    if worst is None or worst.reason.is_progress:
        waiting = f": {worst.message}" if worst else ""
        return _Said("True", Reason.ROLLING_OUT, f"revision {revision} is being rolled out{waiting}")
    return _Said("False", worst.reason, worst.message)


def _component(state: ComponentState | None, component: str, observed: Observed) -> _Said:
    if state is None or not state.exists:
        return _Said("False", Reason.PODS_PENDING, f"no {component} pods exist yet")
    if state.wanted == 0:
        return _Said(
            "False", Reason.SCALED_TO_ZERO, f"{component} has 0 replicas, so no request can be answered; raise replicas"
        )
    problem = component_problem(state, observed.key.namespace)
    if problem is None:
        return _Said("True", Reason.PODS_READY, f"{state.ready} of {state.wanted} {component} pods are ready")
    return _Said("False", problem.reason, problem.message)


def _own_router(spec: Spec) -> _Said | None:
    """Return what to say of no router where the connector needs one that the user brings; None where it does not."""
    if PROFILES[spec.kv_connector.type].router_discovers:
        return None
    words = f"no router is wanted with spec.kvConnector.type {spec.kv_connector.type}: yours asks the engines"
    return _Said("True", Reason.PODS_READY, words)


def _config(target: Target, *, engines_run: bool) -> _Said:
    if target.violations:
        return _Said("False", Reason.INVALID_SPEC, _cut(f"the spec is refused: {_lines(target.violations)}"))
    unknown = [finding for finding in target.warnings if finding.rule == UNKNOWN_MODEL_RULE]
    if unknown and not (engines_run and target.spec is not None and start_proves_heads(target.spec)):
        return _Said("Unknown", Reason.MODEL_UNKNOWN, _cut(_lines(unknown)))
    if unknown:
        said = "the catalogue does not know the model, but engines of both roles run with these sizes, and they "
        return _Said("True", Reason.RULES_PASSED, f"{said}are checked against the model's heads at the start")
    advice = f"; advice: {_lines(target.warnings)}" if target.warnings else ""
    return _Said("True", Reason.RULES_PASSED, _cut(f"prefill and decode fit together{advice}"))


def start_proves_heads(spec: Spec) -> bool:
    """Whether engines that run have shown that their sizes suit the model's heads, whatever these are.

    The bundled connector reads the heads from the engine and holds its sizes to the whole rule before it starts
    (`dcp_connector.geometry`). With another one it is up to vLLM. It refuses at its start what the rules about
    heads refuse, but for one case: T tensor ranks of which T / H share a KV head, and a decode context W up to T / H
    that doesn't divide it. With W 1, with W = T (then H is 1), and with T a power of two (then T / H and W are too, and
    the smaller divides the larger) there is no such case.
    """
    if PROFILES[spec.kv_connector.type].bundled:
        return True
    sizes = [resolve_role(spec, role) for role in Role]
    return all(
        each.prefill_context == 1 and (each.decode_context in (1, each.tensor) or each.tensor & (each.tensor - 1) == 0)
        for each in sizes
    )


def _lines(findings: Iterable[Finding]) -> str:
    return "; ".join(map(str, findings))


def _with_times(said: Mapping[str, _Said], observed: Observed, now: str) -> list[Condition]:
    before = {entry["type"]: entry for entry in entries(observed.status, "conditions")}

    def since(kind: str, status: Verdict) -> str:
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
    )


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
