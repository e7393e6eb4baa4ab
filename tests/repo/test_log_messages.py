"""Log lines of the operator have constant messages: what differs is a `key=%s`, which JSON shows as a field."""

import ast
import re

import pytest

from tests.support.markdown import ROOT

METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
#: Field names that a line has anyway.
OWN = {"time", "level", "logger", "message", "traceback", "namespace_", "reconcile"}


def log_calls() -> list[tuple[str, ast.Call]]:
    """Return every call of `log.METHOD`, with its place."""
    found: list[tuple[str, ast.Call]] = []
    for path in sorted((ROOT / "operator").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _is_of_log(node.func):
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", node))
    return found


def _is_of_log(function: ast.expr) -> bool:
    is_method = isinstance(function, ast.Attribute) and function.attr in METHODS
    return is_method and isinstance(function.value, ast.Name) and function.value.id == "log"


CALLS = log_calls()


@pytest.mark.parametrize(("place", "call"), CALLS, ids=[place for place, _ in CALLS])
def test_a_log_message_is_constant_and_everything_else_has_a_key(place: str, call: ast.Call) -> None:
    template = call.args[0]
    assert isinstance(template, ast.Constant), f"{place}: the message is put together"
    assert isinstance(template.value, str)
    placeholders = re.findall(r"(\S*?)%[-+ #0-9.]*([a-zA-Z])", template.value)
    assert all(re.fullmatch(r"[a-z_]+=", key) for key, _ in placeholders), f"{place}: {template.value}"
    keys = [key.removesuffix("=") for key, _ in placeholders]
    assert len(keys) == len(set(keys)) == len(call.args) - 1, f"{place}: {template.value}"
    assert not OWN & set(keys), f"{place}: {template.value}"


def test_there_are_log_lines() -> None:
    assert len(CALLS) > 10
