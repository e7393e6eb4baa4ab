"""Which flags a list of arguments sets, as argparse would find them: abbreviations, `=`, short forms, lists of values.

Argparse itself stops at the first mistake and ends the process; this reader reports every mistake with its place and
goes on. `tests/contract` compares the two on the installed vLLM.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from dcp_operator.flags.convert import Value, convert
from dcp_operator.flags.spelling import Token, rewrite
from dcp_operator.flags.table import FlagSpec, FlagTable, known_flags

#: Unknown flags for which the nearest known one is looked up; who has more has one mistake in all of them.
_MOST_NEAREST = 4
_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")


class ProblemKind(Enum):
    """Why an argument can't be read; the engine would end at start-up with each of them."""

    STRAY = auto()
    UNKNOWN = auto()
    AMBIGUOUS = auto()
    NEEDS_VALUE = auto()
    TAKES_NO_VALUE = auto()
    ENDS_ENGINE = auto()


@dataclass(frozen=True, slots=True)
class Problem:
    """One argument that can't be read: its index in `extraArgs`, what was written, and what was meant instead."""

    kind: ProblemKind
    index: int
    text: str
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Flag:
    """One use of a flag: its canonical name, the index and spelling in `extraArgs`, its values, `--no-x` as negated."""

    name: str
    index: int
    spelling: str
    values: tuple[str, ...]
    negated: bool
    spec: FlagSpec

    @property
    def kind(self) -> str:
        """The kind of its values; bool where it takes none."""
        return self.spec.kind

    @property
    def value(self) -> str:
        """The values in one string, for messages and for flags that take one."""
        return " ".join(self.values)


@dataclass(frozen=True, slots=True)
class Reading:
    """All uses of flags in their order, the arguments that can't be read, and whose flags these are: "0.32 or 0.33"."""

    flags: tuple[Flag, ...]
    problems: tuple[Problem, ...]
    vllm: str

    def last(self, name: str) -> Flag | None:
        """Return the use of a flag that counts: the last one, because each use overwrites the one before."""
        return next((flag for flag in reversed(self.flags) if flag.name == name), None)


@dataclass(frozen=True, slots=True)
class _Option:
    """A token taken for a flag; without `spec` nothing is known of it."""

    token: Token
    spec: FlagSpec | None
    spelling: str
    explicit: str | None
    candidates: tuple[str, ...] = ()


def read_arguments(arguments: Sequence[str], table: FlagTable | None = None) -> Reading:
    """Read arguments as `python -m vllm.entrypoints.openai.api_server` does. Never fails.

    `table` holds the flags of the version that will read them, if it is known; without it those of all supported ones.
    """
    known = table or known_flags()
    unknown = 0
    rewritten = rewrite(arguments)
    problems = [Problem(ProblemKind.NEEDS_VALUE, index, arguments[index]) for index in rewritten.unreadable]
    flags: list[Flag] = []
    items = [_classify(token, known) for token in rewritten.tokens]
    position = 0
    while position < len(items):
        item = items[position]
        position += 1
        if isinstance(item, Token):
            problems.append(Problem(ProblemKind.STRAY, item.origin, item.text))
            continue
        values = _plain_behind(items, position)
        if item.spec is None:
            ambiguous = len(item.candidates) > 1
            kind = ProblemKind.AMBIGUOUS if ambiguous else ProblemKind.UNKNOWN
            candidates = item.candidates
            if not candidates and unknown < _MOST_NEAREST:
                unknown += 1
                near = known.nearest(item.spelling.partition("=")[0])
                candidates = (near,) if near else ()
            problems.append(Problem(kind, item.token.origin, item.token.text, candidates))
            # An unknown flag most likely takes the value behind it, which is no mistake of its own then.
            position += min(1, len(values)) if "=" not in item.token.text else 0
            continue
        outcome = _take(item, item.spec, values, arguments[item.token.origin])
        if isinstance(outcome, Problem):
            problems.append(outcome)
            continue
        flags.append(outcome)
        if item.explicit is None:
            position += len(outcome.values)
    return Reading(tuple(flags), tuple(sorted(problems, key=lambda problem: problem.index)), known.vllm)


def flag_value(flag: Flag) -> Value | bool:
    """Return the value of a flag: a number for numbers, a bool for switches, the text otherwise.

    Raises BadValueError for a value that vLLM would not take.
    """
    if flag.kind == "bool":
        return not flag.negated
    values = [convert(flag.spec, text) for text in flag.values]
    return values[0] if len(values) == 1 else flag.value


def _take(option: _Option, spec: FlagSpec, following: list[str], written: str) -> Flag | Problem:
    """Give a flag its values: the explicit one, or as many of the following as it takes."""
    index = option.token.origin
    if spec.canonical == "--help":
        return Problem(ProblemKind.ENDS_ENGINE, index, written)
    if option.explicit is not None:
        if spec.arity == "0":
            return Problem(ProblemKind.TAKES_NO_VALUE, index, written)
        values = [option.explicit]
    elif spec.arity == "0":
        values = []
    elif spec.arity in ("+", "*"):
        values = following
    else:
        values = following[:1]
    if not values and spec.arity in ("1", "+"):
        return Problem(ProblemKind.NEEDS_VALUE, index, written)
    return Flag(
        name=spec.canonical,
        index=index,
        spelling=written.partition("=")[0],
        values=tuple(values),
        negated=option.spelling in spec.off,
        spec=spec,
    )


def _plain_behind(items: list[Token | _Option], position: int) -> list[str]:
    """Return the run of arguments behind a position that are no flags."""
    values: list[str] = []
    for index in range(position, len(items)):
        item = items[index]
        if not isinstance(item, Token) or item.text == "--":
            break
        values.append(item.text)
    return values


def _classify(token: Token, known: FlagTable) -> Token | _Option:
    """Return a token that is a flag as an option, and any other as it is (argparse's `_parse_optional`)."""
    text = token.text
    if len(text) < 2 or not text.startswith("-") or text == "--":
        return token
    if text in known.by_name:
        return _Option(token, known.by_name[text], text, None)
    name, equals, value = text.partition("=")
    explicit = value if equals else None
    if equals and name in known.by_name:
        return _Option(token, known.by_name[name], name, explicit)
    candidates = _abbreviations(text, name, explicit, known)
    if len(candidates) == 1:
        spelling, explicit = candidates[0]
        return _Option(token, known.by_name[spelling], spelling, explicit)
    if not candidates and (_NEGATIVE_NUMBER.match(text) or " " in text):
        return token
    return _Option(token, None, text, None, tuple(spelling for spelling, _ in candidates))


def _abbreviations(text: str, name: str, explicit: str | None, known: FlagTable) -> list[tuple[str, str | None]]:
    """Return every (spelling, explicit value) that a token may abbreviate (argparse's `_get_option_tuples`).

    A short form with = may be abbreviated (`-pc=2`) since the patch releases of Python 3.12 of late 2024. vLLM's images
    run a later one; an earlier one ends with such an argument.
    """
    found: list[tuple[str, str | None]] = [(spelling, explicit) for spelling in known.matching(name)]
    if text.startswith("--"):
        return found
    if text[:2] in known.by_name and text[:2] != text:
        found.append((text[:2], text[2:]))
    return found
