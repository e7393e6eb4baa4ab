"""Where in a file a field stands: for output that points at lines (SARIF, annotations)."""

import re
from collections.abc import Iterator
from typing import Any, Final, cast

import yaml

_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEP = re.compile(r"\[([^\]]*)\]|([^.\[]+)")


class Positions:
    """The lines of one file's documents. The text must be one that could be read."""

    def __init__(self, text: str) -> None:
        self._roots: list[Any] = list(yaml.compose_all(text, Loader=_LOADER))

    def line(self, number: int, item: int | None, path: str) -> int:
        """Return the line, from 1, of a field of a document, or of what is nearest above a field that isn't there.

        `path` is a finding's: keys with dots between them, positions or names of list elements in brackets.
        """
        root = self._roots[number] if number < len(self._roots) else None
        steps = [*(("items", str(item)) if item is not None else ()), *_steps(path)]
        line = 0 if root is None else root.start_mark.line
        node = root
        for step in steps:
            found = _enter(node, step)
            if found is None:
                break
            line, node = found
        return line + 1


def _steps(path: str) -> Iterator[str]:
    for match in _STEP.finditer(path):
        yield match[1] if match[1] is not None else match[2]


def _enter(node: Any, step: str) -> tuple[int, Any] | None:
    """Return the line where a step of a path begins, and the node behind it; None if there is no such step."""
    if isinstance(node, yaml.MappingNode):
        for key, value in cast("list[tuple[Any, Any]]", node.value):
            if key.value == step:
                return key.start_mark.line, value
    if isinstance(node, yaml.SequenceNode):
        elements = cast("list[Any]", node.value)
        if step.isdecimal() and int(step) < len(elements):
            found = elements[int(step)]
            return found.start_mark.line, found
        for element in elements:
            named = _enter(element, "name") if isinstance(element, yaml.MappingNode) else None
            if named is not None and getattr(named[1], "value", None) == step:
                return element.start_mark.line, element
    return None
