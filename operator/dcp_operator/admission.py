"""What admission answers for an object: pure, from the new and the old object."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dcp_operator.api.findings import Finding
from dcp_operator.api.load import load
from dcp_operator.api.objects import DCPDisaggDeployment
from dcp_operator.build import TemplateError, check_templates
from dcp_operator.catalogue import Catalogue
from dcp_operator.observed import section
from dcp_operator.rules.engine import check_body
from dcp_operator.target import unrenderable

#: The API server drops warnings beyond these bounds, characters each and together.
_MAX_WARNING = 256
#: Before an error that an update inherits. The reconciler applies nothing of such a spec, and the condition says why.
_INHERITED = "not applied while this is so: "


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer: a refusal with one line per finding or None, and warnings either way."""

    refusal: str | None
    warnings: tuple[str, ...] = ()


def review(new: dict[str, Any], old: dict[str, Any] | None, catalogue: Catalogue | None = None) -> Verdict:
    """Judge an object that is created (`old` is None) or updated.

    The whole new object is judged, whatever changed. What the object was stored with is no reason to refuse an update
    that leaves it alone, or objects from before a rule could not be edited, let go or deleted: an error that the old
    object has too, in the same words, becomes a warning. Updates that leave the spec as it is, and those of an object
    that is being deleted, pass without a word. Without a catalogue the models of this release are known.
    """
    if old is not None and ("deletionTimestamp" in section(new, "metadata") or new.get("spec") == old.get("spec")):
        return Verdict(None)
    report = check_body(new, old=old, catalogue=catalogue)
    warnings = tuple(
        _shorten(text) for text in (*map(str, report.warnings), *(_INHERITED + str(each) for each in report.inherited))
    )
    if report.violations:
        return Verdict(_lines(report.violations), warnings)
    obj = load(new).obj
    unrendered = _unrendered(obj) if obj is not None and not report.inherited else None
    if unrendered is None:
        return Verdict(None, warnings)
    before = load(old).obj if old is not None else None
    if before is not None and _unrendered(before) == unrendered:
        return Verdict(None, (*warnings, _shorten(_INHERITED + unrendered)))
    return Verdict(unrendered, warnings)


def _unrendered(obj: DCPDisaggDeployment) -> str | None:
    """Return why no pods can be made from an object that the rules take, None where they can."""
    try:
        check_templates(obj.metadata.name or "name", obj.metadata.namespace, obj.spec)
    except (TemplateError, ValidationError) as error:
        return str(unrenderable(error))
    return None


def _lines(findings: Iterable[Finding]) -> str:
    return "\n".join(map(str, findings))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_WARNING else f"{text[: _MAX_WARNING - 3]}..."
