"""What admission says about an object: one finding is one sentence about one field."""

import json
from dataclasses import dataclass
from enum import StrEnum

#: Id of findings that the API server's own schema check would report as well.
SCHEMA_RULE = "schema"

_SHOWN_CHARACTERS = 60
_PATH_CHARACTERS = 200
_MESSAGE_CHARACTERS = 500


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

    def __post_init__(self) -> None:
        # Keys of free-form maps become part of paths and messages, and a user may have put anything into them.
        object.__setattr__(self, "path", one_line(self.path, _PATH_CHARACTERS))
        object.__setattr__(self, "message", one_line(self.message, _MESSAGE_CHARACTERS))

    def __str__(self) -> str:
        return f"{self.path}: {self.message} [{self.rule}]"


def show(value: object) -> str:
    """Return a value as a user would write it in JSON, cut to a readable length; never fails, whatever the value is."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return one_line(text, _SHOWN_CHARACTERS)


def one_line(text: str, characters: int) -> str:
    """Return a text without control characters and lone surrogates, cut to a length."""
    printable = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text[: characters + 1]
    )
    return printable if len(printable) <= characters else printable[: characters - 3] + "..."


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
