"""`dcpctl validate --suggest`: refused objects with the smallest change that makes them allowed."""

import json
from collections.abc import Sequence
from typing import Any

from dcp_operator.catalogue import Catalogue
from dcp_operator.cli.problems import CliError, Outcome
from dcp_operator.cli.reports import Judged, json_line, text_lines
from dcp_operator.cli.yaml_io import write_document
from dcp_operator.rules.suggest import Suggestion, suggest

_NOTHING = "no small change makes it allowed; `dcpctl explain RULE` says what each rule asks for"


def suggested(
    judged: Sequence[Judged],
    *,
    output: str,
    catalogue: Catalogue | None,
    code: int,
    notes: tuple[str, ...],
) -> Outcome:
    """Return every object as it would be allowed: as YAML with the changes in comments, or a key `suggestion` in JSON.

    The exit code stays that of the objects as they were given. Raises CliError for another output.
    """
    if output == "json":
        lines = [json_line(each, suggestion=_changes(_suggestion(each, catalogue))) for each in judged]
        return Outcome(code, "".join(f"{line}\n" for line in lines), notes)
    if output != "text":
        raise CliError(f"--suggest prints objects, or with -o json their changes; it goes with no -o {output}")
    text, remarks = "", list(notes)
    for each in judged:
        found = _suggestion(each, catalogue)
        if not each.report.allowed or each.report.warnings:
            remarks += text_lines(each.document, each.report)
        if found is None:
            remarks.append(f"  {_NOTHING}")
            continue
        comments = "".join(f"# {_sentence(path, value)}\n" for path, value in found.values)
        text += f"---\n{comments}{write_document(found.body)}"
    return Outcome(code, text, tuple(remarks))


def _suggestion(judged: Judged, catalogue: Catalogue | None) -> Suggestion | None:
    if judged.report.allowed:
        return Suggestion((), judged.document.body)
    return suggest(judged.document.body, catalogue=catalogue)


def _changes(suggestion: Suggestion | None) -> list[dict[str, Any]] | None:
    if suggestion is None:
        return None
    return [{"path": path, "value": value} for path, value in suggestion.values]


def _sentence(path: str, value: object) -> str:
    return f"{path}: left out" if value is None else f"{path}: set to {json.dumps(value, ensure_ascii=False)}"
