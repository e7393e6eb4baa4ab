"""Findings as a SARIF 2.1.0 log, which code hosts show beside the lines that they are about.

The format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. One run, whose tool is this command and
whose rules are those that found something; files are named relative to the working directory where they lie in it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from dcp_operator.cli.documents import STDIN, Contents
from dcp_operator.cli.reports import Judged, Lines
from dcp_operator.cli.version import version
from dcp_operator.rules import explain

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_log(judged: Sequence[Judged], contents: Contents) -> str:
    """Return the log of all objects, indented, with files that can't be read as notifications of the run."""
    lines = Lines(contents)
    found = [(each.document, level, finding) for each in judged for level, finding in each.findings]
    rules = list(dict.fromkeys(finding.rule for _, _, finding in found))
    results: list[dict[str, Any]] = [
        {
            "ruleId": finding.rule,
            "ruleIndex": rules.index(finding.rule),
            "level": level,
            "message": {"text": f"{finding.path}: {finding.message}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _uri(document.file)},
                        "region": {"startLine": lines.of(document, finding)},
                    },
                    "logicalLocations": [{"fullyQualifiedName": f"{document.title}: {finding.path}"}],
                }
            ],
        }
        for document, level, finding in found
    ]
    notifications = [{"level": "error", "message": {"text": sentence}} for sentence in contents.unreadable]
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "dcpctl", "version": version(), "rules": [_rule(rule) for rule in rules]}},
        "invocations": [{"executionSuccessful": not notifications, "toolExecutionNotifications": notifications}],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _rule(rule: str) -> dict[str, Any]:
    text = explain(rule) or rule
    return {"id": rule, "shortDescription": {"text": text.partition("\n")[0]}, "help": {"text": text}}


def _uri(file: str) -> str:
    """Return how a log names a file: relative to the working directory, or as a whole file URI outside of it."""
    if file == STDIN:
        return "stdin"
    path = Path(file)
    if path.is_absolute():
        try:
            path = path.relative_to(Path.cwd())
        except ValueError:
            return path.as_uri()
    return quote(path.as_posix())
