"""What admission says about an object: one finding is one sentence about one field."""

import json
from dataclasses import dataclass
from enum import StrEnum

#: Id of findings that the API server's own schema check would report as well.
SCHEMA_RULE = "schema"

_SHOWN_CHARACTERS = 60


class Severity(StrEnum):
    """An error refuses the object, a warning is shown and the object is taken."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation or warning.

    `path` is the field in the form that kubectl shows (`spec.decode.extraArgs[2]`), `message` what was found, the rule
    with its numbers and the nearest values that work.
    """

    rule: str
    path: str
    message: str
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        return f"{self.path}: {self.message} [{self.rule}]"


def show(value: object) -> str:
    """Return a value as a user would write it in JSON, cut to a readable length; never fails, whatever the value is."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def kind_of(value: object) -> str:
    """Return the name of a value's JSON type, with its article."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "a boolean"
        case int():
            return "a whole number"
        case float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case dict():
            return "a map"
        case _:
            return f"a {type(value).__name__}"
