"""What an object asks for: its spec read, judged by the rules, and rendered."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from dcp_operator import names
from dcp_operator.api.findings import SCHEMA_RULE, Finding
from dcp_operator.api.load import load
from dcp_operator.api.spec import Spec
from dcp_operator.build import Context, TemplateError, render_context, revision_of
from dcp_operator.catalogue import Catalogue
from dcp_operator.kinds import SECRET
from dcp_operator.observed import Observed
from dcp_operator.rules.engine import check


@dataclass(frozen=True, slots=True)
class Operator:
    """What the operator knows about itself."""

    image: str
    pull_policy: str = "IfNotPresent"
    #: The models that are known; None for those of this release.
    catalogue: Catalogue | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted. Without a revision the object was refused, and `violations` say why."""

    spec: Spec | None
    violations: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    revision: str | None = None
    manifests: tuple[dict[str, Any], ...] = field(default=(), repr=False)


def resolve_target(observed: Observed, operator: Operator, fresh_key: str) -> Target:
    """Return what the object asks for.

    The rules are asked again, although admission asked them: a webhook can have been absent, or older. `fresh_key` is
    the control channel's key, base64, for an object that has none yet.
    """
    loaded = load(observed.body)
    if loaded.obj is None:
        return Target(spec=None, violations=loaded.findings)
    spec = loaded.obj.spec
    report = check(loaded.obj, catalogue=operator.catalogue)
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
        )
        context = _as_created(draft, observed)
        return Target(spec, (), report.warnings, revision_of(context), tuple(render_context(context)))
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


def _as_created(draft: Context, observed: Observed) -> Context:
    """Return the context with what the revision's first rendering fixed: an upgrade of the operator changes no pod.

    The operator image of a revision is the one that its workloads were made with, and the replicas of a role that is
    left to an autoscaler are those that it has.
    """
    revision = revision_of(draft)
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
        live_replicas=observed.live_replicas(revision),
    )


def is_key_secret(manifest: dict[str, Any]) -> bool:
    """Whether a manifest holds the control channel's key, which no log may show."""
    return manifest.get("kind") == SECRET.kind
