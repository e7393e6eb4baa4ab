"""The rule engine: one list of rules for the webhook, the reconciler and `dcpctl`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from dcp_operator.api.findings import SCHEMA_RULE, Finding, Severity
from dcp_operator.api.load import load
from dcp_operator.api.objects import DCPDisaggDeployment
from dcp_operator.catalogue import Catalogue
from dcp_operator.rules import (
    arguments,
    attention,
    connector,
    devices,
    formats,
    groups,
    images,
    lifecycle,
    model,
    naming,
    pair,
    parallelism,
    placement,
    scaling,
    template,
    transfer,
)
from dcp_operator.rules.context import Context, Problem, Rule, build_context
from dcp_operator.rules.nearest import Nearest

#: All rules, in the order in which findings are reported.
RULES: Final[tuple[Rule, ...]] = (
    *naming.RULES,
    *model.RULES,
    *parallelism.RULES,
    *groups.RULES,
    *attention.RULES,
    *formats.RULES,
    *pair.RULES,
    *images.RULES,
    *transfer.RULES,
    *connector.RULES,
    *scaling.RULES,
    *lifecycle.RULES,
    *arguments.RULES,
    *template.RULES,
    *devices.RULES,
    *placement.RULES,
)

#: Findings of one rule that are reported: who has more must begin somewhere, and garbage must not take its time.
_MOST_FINDINGS: Final = 100


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found in one object: errors refuse it, warnings don't.

    `inherited` are errors that the object had before an update which left alone what they are about: they don't refuse
    the update.
    """

    violations: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    inherited: tuple[Finding, ...] = ()

    @property
    def allowed(self) -> bool:
        """Whether the object may be taken."""
        return not self.violations


def check(
    obj: DCPDisaggDeployment, *, old: DCPDisaggDeployment | None = None, catalogue: Catalogue | None = None
) -> Report:
    """Run all rules on an object and return all findings, in a stable order. Never fails.

    On an update `obj` is the whole new object, whatever changed, and `old` the object before it. An error that `old`
    has too, of the same rule, on the same field and in the same words, is inherited. A message holds every value that
    its rule has read, so equal words mean that the update has left all of them alone.
    """
    context = replace(build_context(obj, catalogue), before=old.spec if old is not None else None)
    found = problems_of(context)
    before = set(map(_identity, problems_of(build_context(old, catalogue)))) if old is not None else set[_Identity]()
    errors = [(rule, problem) for rule, problem in found if problem.severity is Severity.ERROR]
    nearest = Nearest(context, RULES, frozenset((rule.id, problem.path) for rule, problem in errors))
    violations: list[Finding] = []
    inherited: list[Finding] = []
    for rule, problem in errors:
        message = problem.message + nearest.words(rule, problem)
        known = _identity((rule, problem)) in before
        (inherited if known else violations).append(Finding(rule.id, problem.path, message))
    warnings = tuple(
        Finding(rule.id, problem.path, problem.message, Severity.WARNING)
        for rule, problem in found
        if problem.severity is Severity.WARNING
    )
    return Report(tuple(violations), warnings, tuple(inherited))


def check_body(
    body: Mapping[str, Any], *, old: Mapping[str, Any] | None = None, catalogue: Catalogue | None = None
) -> Report:
    """Check a parsed document: its schema first, and the rules once it has one. Never fails."""
    loaded, before = load(body), load(old) if old is not None else None
    if loaded.obj is not None:
        return check(loaded.obj, old=before.obj if before else None, catalogue=catalogue)
    known = set(before.findings) if before else set[Finding]()
    return Report(
        tuple(finding for finding in loaded.findings if finding not in known),
        (),
        tuple(finding for finding in loaded.findings if finding in known),
    )


def problems_of(context: Context) -> list[tuple[Rule, Problem]]:
    """Return everything that the rules find, in the order of the rules."""
    return [(rule, problem) for rule in RULES for problem in islice(rule.check(context), _MOST_FINDINGS)]


def explain(rule_id: str) -> str | None:
    """Return what a rule asks for, why, and how to satisfy it; None for an id that no rule has."""
    if rule_id == SCHEMA_RULE:
        return _SCHEMA_EXPLANATION
    return next((rule.explanation for rule in RULES if rule.id == rule_id), None)


def rule_ids() -> list[str]:
    """Return the ids of all rules, in the order of reports."""
    return [SCHEMA_RULE, *(rule.id for rule in RULES)]


_Identity = tuple[str, str, str]


def _identity(found: tuple[Rule, Problem]) -> _Identity:
    rule, problem = found
    return rule.id, problem.path, problem.message


_SCHEMA_EXPLANATION = """\
Every field exists, has the right type and lies within its bounds.

The API server checks the same against the CustomResourceDefinition and would refuse the object.

Correct the field that the message names; `kubectl explain dcpd.spec --recursive` lists all fields."""
