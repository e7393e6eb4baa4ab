"""Lines of the log: constant messages with keys and values, as JSON or as text.

A call states both in one template: `log.info("applied object=%s child=%s", key, ref)`. Text shows the line as it reads.
JSON takes it apart again: each `key=%s` becomes a field that holds the argument, and what is left is the message, the
same for every line of that place. The standard library is enough for that, and kopf's and aiohttp's lines, which come
through it anyway, take the same way.

Within a pass over an object every line bears the object and the number of the pass, whoever writes it.
"""

import json
import logging
import re
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

FORMATS: Final = ("text", "json")
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
_PLACEHOLDER: Final = re.compile(r"(?:(?P<key>[a-z_][a-z0-9_]*)=)?%(?P<spec>[-+ #0-9.]*[a-zA-Z%])")
#: Fields that no template may take.
_OWN: Final = ("time", "level", "logger", "message", "traceback")


class _Pass:
    """The pass over an object that a task is in."""

    __slots__ = ("namespace", "number", "subject")

    def __init__(self, namespace: str, subject: str, number: str) -> None:
        self.namespace = namespace
        self.subject = subject
        self.number = number


_pass: ContextVar[_Pass | None] = ContextVar("pass", default=None)


@contextmanager
def pass_over(namespace: str, subject: str, number: str) -> Generator[None]:
    """Mark all lines of the block: `subject` is NAMESPACE/NAME, `number` tells this pass from all others."""
    token = _pass.set(_Pass(namespace, subject, number))
    try:
        yield
    finally:
        _pass.reset(token)


class TextFormatter(logging.Formatter):
    """A line as a person reads it, with the number of the pass at its end."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        """Return the line without a traceback."""
        line, current = super().formatMessage(record), _pass.get()
        return f"{line} reconcile={current.number}" if current is not None else line


class JsonFormatter(logging.Formatter):
    """A line as a machine reads it: one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        message, fields = take_apart(record)
        current = _pass.get()
        if current is not None:
            fields = {
                "object": current.subject,
                "namespace": current.namespace,
                "reconcile": current.number,
                **fields,
            }
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **{f"{key}_" if key in _OWN else key: _plain(value) for key, value in fields.items()},
        }
        if record.exc_info and record.exc_info[1] is not None:
            said["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(said, ensure_ascii=False)


def take_apart(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Return a record's constant message and its fields. A template without `key=` is one message, filled in."""
    template, arguments = str(record.msg), record.args
    if not isinstance(arguments, tuple) or not arguments:
        return record.getMessage(), {}
    left, fields = iter(arguments), dict[str, Any]()

    def fill(found: re.Match[str]) -> str:
        if found["spec"] == "%":
            return f"{found['key']}=%" if found["key"] else "%"
        value = next(left)
        if found["key"]:
            fields[found["key"]] = value
            return ""
        return f"%{found['spec']}" % value

    try:
        words = _PLACEHOLDER.sub(fill, template)
    except (StopIteration, RuntimeError, TypeError, ValueError):
        return record.getMessage(), {}
    return re.sub(r"\s+([:;,.])", r"\1", " ".join(words.split())), fields


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else str(value)
