"""What a command of the command line comes to: its exit code and its output, or one error."""

from dataclasses import dataclass
from typing import Final

EXIT_ALLOWED: Final = 0
EXIT_REFUSED: Final = 1
EXIT_UNREADABLE: Final = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a command; `main` alone writes it, so that a broken output can't change the exit code."""

    code: int
    out: str = ""
    notes: tuple[str, ...] = ()


class CliError(Exception):
    """Something that ends a command; the message is one sentence that says what was found and what to do."""
