"""Every message of every rule, in one file that is read as prose; and what holds for all of them.

The file is written anew with UPDATE_GOLDEN=1.
"""

import ast
import inspect
import os
import re
import sys
from pathlib import Path

import pytest

from dcp_operator.rules import RULES, check_body, rule_ids
from dcp_operator.rules.engine import SCHEMA_RULE
from tests.support.refusals import REFUSALS, UPDATES
from tests.support.specimens import specimen

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
MOST_SENTENCES = 3


def report_of(name):
    if name in UPDATES:
        before, after = UPDATES[name]
        return check_body(specimen(after), old=specimen(before))
    return check_body(specimen(*REFUSALS[name]))


def findings_of(name):
    report = report_of(name)
    return [*report.violations, *report.warnings]


def messages():
    """Return every message once, under the rule that says it."""
    said: dict[str, list[str]] = {rule.id: [] for rule in RULES}
    for name in (*REFUSALS, *UPDATES):
        for finding in findings_of(name):
            line = f"{finding.severity}: {finding}"
            if line not in said.setdefault(finding.rule, []):
                said[finding.rule].append(line)
    return said


def test_the_messages_are_as_recorded():
    text = "\n".join(f"# {rule}\n" + "\n".join(lines) + "\n" for rule, lines in messages().items())
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_every_rule_speaks():
    assert [rule for rule, lines in messages().items() if not lines] == []
    assert set(messages()) <= set(rule_ids())


def problem_lines():
    """Return the place of every Problem that a rule makes, as (file, line)."""
    places = set()
    for module in {inspect.getmodule(rule.check) for rule in RULES}:
        source = inspect.getsource(module)
        for node in ast.walk(ast.parse(source)):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id in ("Problem", "_removable") and node.args and len(node.args) > 1:
                places.add((module.__file__, node.lineno))
    return places


def test_every_branch_of_every_rule_speaks():
    wanted = problem_lines()
    assert len(wanted) > 60
    files = {file for file, _ in wanted}
    reached = set()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for name in (*REFUSALS, *UPDATES):
            report_of(name)
    finally:
        sys.settrace(before)
    silent = {place for place in wanted if place not in reached}
    assert {f"{Path(file).name}:{line}" for file, line in silent} == set()


@pytest.mark.parametrize("name", [*REFUSALS, *UPDATES])
def test_an_object_with_something_wrong_is_told_where_and_what_in_few_sentences(name):
    found = findings_of(name)
    assert found
    for finding in found:
        assert finding.path.startswith(("spec.", "metadata.")), finding
        assert finding.rule != SCHEMA_RULE
        sentences = re.split(r"(?<=[a-z0-9)])[.?!] (?=[A-Z])", finding.message)
        assert len(sentences) <= MOST_SENTENCES, finding
        assert not finding.message.endswith("."), finding
        assert "None" not in finding.message
        assert len(finding.message) < 480, finding
