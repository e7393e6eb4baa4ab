"""The rule engine: one list of rules for the webhook, the reconciler and `dcpctl`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from dcp_operator.api.findings import SCHEMA_RULE, Finding, Severity
from dcp_operator.api.load import load
from dcp_operator.api.objects import DCPDisaggDeployment
from dcp_operator.rules import arguments, connector, model, naming, pair, parallelism, scaling, template
from dcp_operator.rules.context import Rule, build_context

#: All rules, in the order in which findings are reported.
RULES: Final[tuple[Rule, ...]] = (
    *naming.RULES,
    *model.RULES,
    *parallelism.RULES,
    *pair.RULES,
    *connector.RULES,
    *scaling.RULES,
    *arguments.RULES,
    *template.RULES,
)


#: Findings of one rule that are reported: who has more must begin somewhere, and garbage must not take its time.
_MOST_FINDINGS: Final = 100


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found in one object: errors refuse it, warnings don't."""

    violations: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()

    @property
    def allowed(self) -> bool:
        """Whether the object may be taken."""
        return not self.violations


def check(obj: DCPDisaggDeployment, *, old: DCPDisaggDeployment | None = None) -> Report:
    """Run all rules on an object and return all findings, in a stable order. Never fails.

    On an update `obj` is the whole new object, with every field that the update left alone; `old` is the object before
    it. No rule looks at `old` yet: whatever changed, the result must be right as a whole.
    """
    del old
    return _report(_findings(obj))


def check_body(body: Mapping[str, Any]) -> Report:
    """Check a parsed document: its schema first, and the rules once it has one. Never fails."""
    loaded = load(body)
    return check(loaded.obj) if loaded.obj is not None else _report(iter(loaded.findings))


def explain(rule_id: str) -> str | None:
    """Return what a rule asks for, why, and how to satisfy it; None for an id that no rule has."""
    if rule_id == SCHEMA_RULE:
        return _SCHEMA_EXPLANATION
    return next((rule.explanation for rule in RULES if rule.id == rule_id), None)


def rule_ids() -> list[str]:
    """Return the ids of all rules, in the order of reports."""
    return [SCHEMA_RULE, *(rule.id for rule in RULES)]


def _findings(obj: DCPDisaggDeployment) -> Iterator[Finding]:
    context = build_context(obj)
    for rule in RULES:
        for problem in islice(rule.check(context), _MOST_FINDINGS):
            yield Finding(rule.id, problem.path, problem.message, problem.severity)


def _report(findings: Iterator[Finding]) -> Report:
    everything = tuple(findings)
    return Report(
        violations=tuple(each for each in everything if each.severity is Severity.ERROR),
        warnings=tuple(each for each in everything if each.severity is Severity.WARNING),
    )


_SCHEMA_EXPLANATION = """\
Every field exists, has the right type and lies within its bounds.

The API server checks the same against the CustomResourceDefinition and would refuse the object.

Correct the field that the message names; `kubectl explain dcpd.spec --recursive` lists all fields."""
