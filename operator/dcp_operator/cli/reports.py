"""What `dcpctl validate` prints about each object: text, JSON, annotations of GitHub, or one SARIF log for all."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dcp_operator.api.findings import Finding
from dcp_operator.cli.documents import Contents, Document
from dcp_operator.cli.positions import Positions
from dcp_operator.rules import Report

OUTPUTS: Final = ("text", "json", "sarif", "github")

#: What GitHub's runner reads back: https://docs.github.com/actions/reference/workflow-commands-for-github-actions
_DATA: Final = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY: Final = {**_DATA, ":": "%3A", ",": "%2C"}


@dataclass(frozen=True, slots=True)
class Judged:
    """One object and what was found in it."""

    document: Document
    report: Report

    @property
    def findings(self) -> Iterator[tuple[str, Finding]]:
        """Yield every finding with its level: error or warning."""
        yield from (("error", finding) for finding in self.report.violations)
        yield from (("warning", finding) for finding in self.report.warnings)


@dataclass(slots=True)
class Lines:
    """Lines of findings; a file is looked through when the first of its findings is asked about."""

    contents: Contents
    _known: dict[str, Positions] = field(default_factory=dict[str, Positions])

    def of(self, document: Document, finding: Finding) -> int:
        """Return the line, from 1, that a finding is about."""
        if document.file not in self._known:
            self._known[document.file] = Positions(self.contents.texts[document.file])
        return self._known[document.file].line(document.number, document.item, finding.path)


def text_lines(document: Document, report: Report) -> Iterator[str]:
    """Yield a headline and one line per finding."""
    verdict = "allowed" if report.allowed else "refused"
    counts = ", ".join(
        f"{len(findings)} {word}{'' if len(findings) == 1 else 's'}"
        for findings, word in ((report.violations, "error"), (report.warnings, "warning"))
        if findings
    )
    yield f"{document.file}: {document.title} is {verdict}{f' ({counts})' if counts else ''}"
    yield from (f"  error: {finding}" for finding in report.violations)
    yield from (f"  warning: {finding}" for finding in report.warnings)


def json_line(judged: Judged, **more: Any) -> str:
    """Return the verdict on one object as one line of JSON."""
    document, report = judged.document, judged.report
    return json.dumps(
        {
            "file": document.file,
            "name": document.metadata("name"),
            "namespace": document.metadata("namespace"),
            "allowed": report.allowed,
            "violations": [_json(finding) for finding in report.violations],
            "warnings": [_json(finding) for finding in report.warnings],
            **more,
        },
        ensure_ascii=False,
    )


def annotations(judged: Sequence[Judged], contents: Contents) -> Iterator[str]:
    """Yield one workflow command of GitHub Actions per finding, and one per file that can't be read."""
    lines = Lines(contents)
    for each in judged:
        for level, finding in each.findings:
            place = f"file={_escaped(each.document.file, _PROPERTY)},line={lines.of(each.document, finding)}"
            said = f"{each.document.title}: {finding.path}: {finding.message}"
            yield f"::{level} {place},title={_escaped(finding.rule, _PROPERTY)}::{_escaped(said, _DATA)}"
    for sentence in contents.unreadable:
        yield f"::error title=unreadable::{_escaped(sentence, _DATA)}"


def _escaped(text: str, table: dict[str, str]) -> str:
    return "".join(table.get(character, character) for character in text)


def _json(finding: Finding) -> dict[str, Any]:
    return {"rule": finding.rule, "path": finding.path, "message": finding.message}
