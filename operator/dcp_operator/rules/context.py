"""What every rule gets to see: the object with all that is derived from it, computed once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from dcp_operator.api.findings import Severity
from dcp_operator.api.objects import DCPDisaggDeployment
from dcp_operator.api.spec import Geometry, RoleSpec, Spec
from dcp_operator.catalogue import Catalogue, builtin
from dcp_operator.connectors import PROFILES, Profile
from dcp_operator.flags import Reading, image_version, known_flags, read_arguments
from dcp_operator.rules.edits import Fix, changed_spec
from dcp_operator.rules.facts import Facts, model_facts
from dcp_operator.rules.pod_template import PodTemplate, read_template
from dcp_operator.settings import EngineSettings, Role, resolve_role, role_spec


class Problem(NamedTuple):
    """What a rule found: the field, the sentence with every number that it depends on, and changes that would help.

    `fixes` are all candidates, in any order. Of those that change a value the nearest that work for the whole object
    are named behind the message, so the message itself names none.
    """

    path: str
    message: str
    severity: Severity = Severity.ERROR
    fixes: tuple[Fix, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleContext:
    """One role: what is stated, what follows from it, its arguments and its pod template, both read."""

    role: Role
    stated: RoleSpec
    settings: EngineSettings
    arguments: Reading
    template: PodTemplate

    @property
    def path(self) -> str:
        """Path of the role's fields."""
        return f"spec.{self.role}"

    def argument_path(self, index: int) -> str:
        """Path of one item of extraArgs."""
        return f"{self.path}.extraArgs[{index}]"


@dataclass(frozen=True, slots=True)
class Context:
    """The object and both roles."""

    obj: DCPDisaggDeployment
    prefill: RoleContext
    decode: RoleContext
    router_template: PodTemplate
    #: What is known of the model, from the object or from the catalogue; None if nothing is.
    facts: Facts | None
    catalogue: Catalogue
    #: The spec before an update, for what only a change can say; None where nothing is known of one.
    before: Spec | None = None

    @property
    def spec(self) -> Spec:
        """What the user states."""
        return self.obj.spec

    @property
    def geometry(self) -> Geometry | None:
        """The model's heads, where they are known."""
        return self.facts.geometry if self.facts else None

    @property
    def profile(self) -> Profile:
        """The connector that the object names."""
        return PROFILES[self.obj.spec.kv_connector.type]

    @property
    def roles(self) -> tuple[RoleContext, RoleContext]:
        """Both roles, in the order of reports."""
        return (self.prefill, self.decode)

    def model_path(self, field: str) -> str:
        """Return how a message names a fact of the model: by its field, or as the catalogue's."""
        return self.facts.path(field) if self.facts else f"spec.model.geometry.{field}"

    def changed(self, fix: Fix) -> "Context":
        """Return the context of the object with a typed field changed. Arguments and templates are not read again."""
        spec = changed_spec(self.spec, fix)
        return replace(
            self,
            obj=self.obj.model_copy(update={"spec": spec}),
            prefill=_restated(self.prefill, spec),
            decode=_restated(self.decode, spec),
            facts=model_facts(spec.model, self.catalogue),
        )


Check = Callable[[Context], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its id, the function that checks it, and where it comes from: public reports, or the engine's own check.

    The function's docstring explains the rule to users in three paragraphs: what it asks for, why, what to do.
    """

    id: str
    check: Check
    sources: tuple[str, ...] = ()
    #: Whether the rule needs the model's heads, and is not checked while they are unknown.
    needs_model: bool = False

    @property
    def explanation(self) -> str:
        """What the rule asks for, why, how to satisfy it, and the sources: the docstring without its indentation."""
        lines = (self.check.__doc__ or "").strip().splitlines()
        text = "\n".join(line.strip() for line in lines)
        return f"{text}\n\nFrom: {', '.join(self.sources)}." if self.sources else text


def build_context(obj: DCPDisaggDeployment, catalogue: Catalogue | None = None) -> Context:
    """Read everything that rules need out of an object; without a catalogue it is that of the release. Never fails."""
    models = catalogue or builtin()
    return Context(
        obj=obj,
        prefill=_role_context(obj.spec, Role.PREFILL),
        decode=_role_context(obj.spec, Role.DECODE),
        router_template=read_template(obj.spec.router.template, "spec.router.template"),
        facts=model_facts(obj.spec.model, models),
        catalogue=models,
    )


def _role_context(spec: Spec, role: Role) -> RoleContext:
    stated = role_spec(spec, role)
    return RoleContext(
        role=role,
        stated=stated,
        settings=resolve_role(spec, role),
        arguments=read_arguments(stated.extra_args, known_flags(image_version(stated.image or spec.image))),
        template=read_template(stated.template, f"spec.{role}.template"),
    )


def _restated(role: RoleContext, spec: Spec) -> RoleContext:
    return replace(role, stated=role_spec(spec, role.role), settings=resolve_role(spec, role.role))
