"""What an object asks for: its spec read, judged by the rules, and rendered."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from dcp_operator import names
from dcp_operator.api.findings import SCHEMA_RULE, Finding
from dcp_operator.api.spec import Spec
from dcp_operator.build import Context, TemplateError
from dcp_operator.build.history import build_history, known_states
from dcp_operator.catalogue import Catalogue
from dcp_operator.kinds import SECRET, WORKLOAD_KINDS, ref_of
from dcp_operator.model_gate import model_gate
from dcp_operator.observed import Observed
from dcp_operator.ports import FIRST_HOST_PORT, LAST_HOST_PORT, assigned_ports, block_size
from dcp_operator.reasons import Problem
from dcp_operator.renderings import Renderings
from dcp_operator.rollout import RolloutState, asked_replicas, rollout_state
from dcp_operator.settings import Role, role_spec


@dataclass(frozen=True, slots=True)
class Operator:
    """What the operator knows about itself."""

    image: str
    pull_policy: str = "IfNotPresent"
    #: Namespace that its pods run in; None where it runs outside of the cluster.
    namespace: str | None = None
    #: The models that are known; None for those of this release.
    catalogue: Catalogue | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted. Without a revision the object was refused, and `violations` say why."""

    spec: Spec | None
    violations: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    revision: str | None = None
    #: Ports of nodes that the revision has, for roles on the host's network.
    host_ports: range = range(0)
    #: What engines of the revision wait for before they are made: their model.
    gate: Problem | None = None
    manifests: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    #: Where the rollout of the revision is, and its next step.
    rollout: RolloutState | None = None


def resolve_target(
    observed: Observed, operator: Operator, fresh_key: str, now: str = "", known: Renderings | None = None
) -> Target:
    """Return what the object asks for.

    The rules are asked again, although admission asked them: a webhook can have been absent, or older. `fresh_key` is
    the control channel's key, base64, for an object that has none yet, and `now` (RFC 3339) tells for how long pods
    have not been ready. `known` are answers of earlier passes; they change how long this takes, and nothing else.
    """
    known = known or Renderings()
    judged = known.judge(observed, operator.catalogue)
    if judged.loaded.obj is None or judged.report is None:
        return Target(spec=None, violations=judged.loaded.findings)
    spec, report = judged.loaded.obj.spec, judged.report
    if report.violations:
        return Target(spec, report.violations, report.warnings)
    try:
        draft = Context(
            name=observed.key.name,
            namespace=observed.key.namespace,
            spec=spec,
            operator_image=operator.image,
            pull_policy=operator.pull_policy,
            uid=observed.uid,
            kv_key=observed.kv_key() or fresh_key,
            operator_namespace=operator.namespace,
        )
        revision = known.revision(draft)
        ports = assigned_ports(observed, spec, revision)
        if ports is None:
            return Target(spec, (_no_ports(spec),), report.warnings)
        context = _as_created(draft, observed, revision, ports)
        manifests = (*known.manifests(context, revision), *build_history(context, revision, known_states(observed)))
        gate = model_gate(manifests, revision, observed)
        rollout = rollout_state(observed, spec, revision, now, gate)
        return Target(spec, (), report.warnings, revision, ports, gate, _behind(gate, manifests, observed), rollout)
    except (TemplateError, ValidationError) as error:
        return Target(spec, (unrenderable(error),), report.warnings)


def unrenderable(error: TemplateError | ValidationError) -> Finding:
    """Return the finding for a spec that no manifest can be made from."""
    if isinstance(error, TemplateError):
        path, _, message = str(error).partition(": ")
        return Finding(SCHEMA_RULE, path, message)
    first = error.errors(include_url=False)[0]
    where = ".".join(["spec.kvConnector.extraConfig", *map(str, first["loc"])])
    return Finding(SCHEMA_RULE, where, first["msg"])


def _behind(
    gate: Problem | None, manifests: tuple[dict[str, Any], ...], observed: Observed
) -> tuple[dict[str, Any], ...]:
    """Return the manifests without the workloads that may not be made yet."""
    if gate is None:
        return manifests
    return tuple(
        manifest
        for manifest in manifests
        if manifest["kind"] not in WORKLOAD_KINDS or ref_of(manifest) in observed.children
    )


def _no_ports(spec: Spec) -> Finding:
    """Return the finding for roles on the host's network when no ports are left for them."""
    role = next(role for role in Role if role_spec(spec, role).host_network)
    return Finding(
        "host-ports",
        f"spec.{role}.hostNetwork",
        f"true needs {block_size(spec)} successive ports of {FIRST_HOST_PORT} to {LAST_HOST_PORT}, and other objects "
        "have taken so many that there are none; delete some of those, or leave the field out",
    )


def _as_created(draft: Context, observed: Observed, revision: str, ports: range) -> Context:
    """Return the context with what the revision's first rendering fixed: an upgrade of the operator changes no pod.

    The operator image of a revision is the one that its workloads were made with, and a role that is left to an
    autoscaler has the engines that are asked for.
    """
    image, policy = draft.operator_image, draft.pull_policy
    for component in names.COMPONENTS:
        child = observed.workload(component, revision)
        remembered = child.annotations.get(names.ANNOTATION_OPERATOR_IMAGE, "") if child is not None else ""
        if " " in remembered:
            policy, image = remembered.split(" ", 1)
            break
    return Context(
        name=draft.name,
        namespace=draft.namespace,
        spec=draft.spec,
        operator_image=image,
        pull_policy=policy,
        uid=draft.uid,
        kv_key=draft.kv_key,
        operator_namespace=draft.operator_namespace,
        asked=asked_replicas(observed, draft.spec),
        host_ports=ports.start if ports else None,
    )


def is_key_secret(manifest: dict[str, Any]) -> bool:
    """Whether a manifest holds the control channel's key, which no log may show."""
    return manifest.get("kind") == SECRET.kind
