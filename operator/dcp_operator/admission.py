"""What admission answers for an object: pure, from the new and the old object."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dcp_operator.api.findings import Finding
from dcp_operator.api.load import load
from dcp_operator.build import TemplateError, render
from dcp_operator.observed import section
from dcp_operator.rules.engine import check
from dcp_operator.target import unrenderable

#: The API server drops warnings beyond these bounds, characters each and together.
_MAX_WARNING = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer: a refusal with one line per finding or None, and warnings either way."""

    refusal: str | None
    warnings: tuple[str, ...] = ()


def review(new: dict[str, Any], old: dict[str, Any] | None) -> Verdict:
    """Judge an object that is created (`old` is None) or updated.

    The whole new object is judged, whatever changed. Two updates always pass, or stored objects that a newer rule
    refuses could not be labelled, let go or deleted: those that leave the spec as it is, and those of an object that
    is being deleted.
    """
    if old is not None and ("deletionTimestamp" in section(new, "metadata") or new.get("spec") == old.get("spec")):
        return Verdict(None)
    loaded = load(new)
    if loaded.obj is None:
        return Verdict(_lines(loaded.findings))
    report = check(loaded.obj)
    warnings = tuple(_shorten(str(finding)) for finding in report.warnings)
    if report.violations:
        return Verdict(_lines(report.violations), warnings)
    try:
        render(loaded.obj.metadata.name or "name", loaded.obj.metadata.namespace, loaded.obj.spec, operator_image="-")
    except (TemplateError, ValidationError) as error:
        return Verdict(str(unrenderable(error)), warnings)
    return Verdict(None, warnings)


def _lines(findings: Iterable[Finding]) -> str:
    return "\n".join(map(str, findings))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_WARNING else f"{text[: _MAX_WARNING - 3]}..."
