"""`dcpctl validate`: the admission rules, offline."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dcp_operator.api.findings import Finding
from dcp_operator.cli.documents import Contents, Document, read_files
from dcp_operator.cli.problems import EXIT_ALLOWED, EXIT_REFUSED, EXIT_UNREADABLE, Outcome
from dcp_operator.rules import Report, check_body


def validate(files: Sequence[str], *, output: str) -> Outcome:
    """Check every object of the files; the output is text, or with `json` one line of JSON per object."""
    contents = read_files(files)
    reports = [(document, check_body(document.body)) for document in contents.documents]
    lines = [
        line
        for document, report in reports
        for line in ([json_line(document, report)] if output == "json" else text_lines(document, report))
    ]
    return Outcome(
        exit_code(contents, [report for _, report in reports]), "".join(f"{line}\n" for line in lines), notes(contents)
    )


def exit_code(contents: Contents, reports: Sequence[Report]) -> int:
    """Return the worst of what was found: unreadable, refused, allowed."""
    if contents.unreadable:
        return EXIT_UNREADABLE
    return EXIT_ALLOWED if all(report.allowed for report in reports) else EXIT_REFUSED


def notes(contents: Contents) -> tuple[str, ...]:
    """Return what was passed over or could not be read, for stderr."""
    result = list(contents.unreadable)
    if contents.others:
        kinds = sorted({other.rpartition(": ")[2] for other in contents.others})
        result.append(f"passed over {_count(len(contents.others))} of other kinds: {', '.join(kinds)}")
    if not contents.documents and not contents.unreadable:
        result.append("found no DCPDisaggDeployment")
    return tuple(result)


def _count(number: int) -> str:
    return f"{number} object{'' if number == 1 else 's'}"


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


def json_line(document: Document, report: Report) -> str:
    """Return the verdict on one object as one line of JSON."""
    return json.dumps(
        {
            "file": document.file,
            "name": document.metadata("name"),
            "namespace": document.metadata("namespace"),
            "allowed": report.allowed,
            "violations": [_json(finding) for finding in report.violations],
            "warnings": [_json(finding) for finding in report.warnings],
        },
        ensure_ascii=False,
    )


def _json(finding: Finding) -> dict[str, Any]:
    return {"rule": finding.rule, "path": finding.path, "message": finding.message}
