"""What every rule gets to see: the object with all that is derived from it, computed once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dcp_operator.api.findings import Severity
from dcp_operator.api.objects import DCPDisaggDeployment
from dcp_operator.api.spec import Geometry, RoleSpec, Spec
from dcp_operator.flags import Reading, read_arguments
from dcp_operator.rules.pod_template import PodTemplate, read_template
from dcp_operator.settings import EngineSettings, Role, resolve_role, role_spec


class Problem(NamedTuple):
    """What a rule found: the field, and the rest of the sentence."""

    path: str
    message: str
    severity: Severity = Severity.ERROR


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

    @property
    def spec(self) -> Spec:
        """What the user states."""
        return self.obj.spec

    @property
    def geometry(self) -> Geometry | None:
        """The model's heads, where they are known."""
        return self.obj.spec.model.geometry

    @property
    def roles(self) -> tuple[RoleContext, RoleContext]:
        """Both roles, in the order of reports."""
        return (self.prefill, self.decode)


Check = Callable[[Context], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its id, and the function that checks it. The function's docstring explains the rule to users."""

    id: str
    check: Check

    @property
    def explanation(self) -> str:
        """What the rule asks for, why, and how to satisfy it: the docstring without its indentation."""
        lines = (self.check.__doc__ or "").strip().splitlines()
        return "\n".join(line.strip() for line in lines)


def build_context(obj: DCPDisaggDeployment) -> Context:
    """Read everything that rules need out of an object. Never fails."""
    return Context(
        obj=obj,
        prefill=_role_context(obj.spec, Role.PREFILL),
        decode=_role_context(obj.spec, Role.DECODE),
        router_template=read_template(obj.spec.router.template, "spec.router.template"),
    )


def _role_context(spec: Spec, role: Role) -> RoleContext:
    stated = role_spec(spec, role)
    return RoleContext(
        role=role,
        stated=stated,
        settings=resolve_role(spec, role),
        arguments=read_arguments(stated.extra_args),
        template=read_template(stated.template, f"spec.{role}.template"),
    )
