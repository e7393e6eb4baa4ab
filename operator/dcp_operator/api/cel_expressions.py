"""Expressions of the Common Expression Language (CEL) for one rule of the CRD, and what they are put together from.

An expression sees one object and no loop over a range, so divisors are found as pairs (d, n/d) with d up to the square
root of the largest n that a field allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

from dcp_operator.api.sentences import Sentence

_OLD = "oldSelf.value()"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a message ends where a condition holds: the nearest values, with %d for each, and the paths of those."""

    condition: str
    text: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CelRule:
    """One entry of x-kubernetes-validations. Paths are relative to the spec, without a leading dot."""

    rule: str
    path: str
    holds: str
    sentence: Sentence
    #: Name in the sentence -> path of the number, or another expression for it.
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    #: Name in the sentence -> word that is known here already.
    words: Mapping[str, object] = field(default_factory=dict[str, object])
    #: An expression for a list of up to two numbers that work.
    nearest: str | None = None
    #: The first whose condition holds ends the message; where none does, the message names no values.
    endings: tuple[Ending, ...] = ()
    #: How a fixed list of changes that work reads; it has the place of `nearest`.
    remedy: str = ""
    #: Optional fields that the rule reads beside its values, and fields that it reads without saying them.
    reads: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the API server reads it. `message` is what a failing messageExpression falls back to."""
        entry: dict[str, Any] = {
            "rule": f"({self.holds}) || (oldSelf.hasValue() && {self._is_unchanged()})",
            "message": f"spec.{self.path}: {self._text().without_values()}{self.remedy} [{self.rule}]",
            "fieldPath": f".{self.path}",
            "optionalOldSelf": True,
        }
        if self._text().places():
            entry["messageExpression"] = self._message()
        return entry

    def _text(self) -> Sentence:
        known = {name: self.words.get(name, f"{{{name}}}") for name in self.sentence.places()}
        return Sentence(self.sentence.say(**known))

    def _message(self) -> str:
        text = self._text()
        places = text.places()
        template = text.say(**dict.fromkeys(places, "%d"))
        values = [value_of(self.values[name]) for name in places]
        start = f"spec.{self.path}: {template}{self.remedy}"
        if self.nearest is not None:
            return _with_nearest(start, self.rule, values=values, nearest=self.nearest)
        message = _format(f"{start} [{self.rule}]", values)
        for ending in reversed(self.endings):
            said = _format(f"{start}{ending.text} [{self.rule}]", [*values, *map(value_of, ending.values)])
            message = f"({ending.condition}) ? {said} : {message}"
        return message

    def _is_unchanged(self) -> str:
        """Return whether an update leaves alone what the rule reads; fields that may be absent are compared as such."""
        paths = dict.fromkeys([*(path for path in self.values.values() if " " not in path), *self.reads])
        return " && ".join(_same(path) for path in paths)


def value_of(expression: str) -> str:
    """Return an expression for a path below the spec; another expression stays as it is."""
    return expression if " " in expression else f"self.{expression}"


def _same(path: str) -> str:
    """Return an expression for `path is as it was`, for a field that may be absent, or below one that may be."""
    if path.endswith(".kvCacheInterleaveSize"):
        return f"(has(self.{path}) == has({_OLD}.{path}) && (!has(self.{path}) || self.{path} == {_OLD}.{path}))"
    steps = path.split(".")
    new, old = "self", _OLD
    known: list[str] = []
    for step in steps:
        known.append(f"has({new}.{step}) && has({old}.{step})")
        new, old = f"{new}.{step}", f"{old}.{step}"
    return f"({' && '.join(known)} && {new} == {old})"


def _format(text: str, values: list[str]) -> str:
    """Return an expression for `text` with its %d filled in.

    `format` is the one way to put numbers into a message: the API server's cost estimate takes the text of a
    converted number, and so any sum of texts, to be without bound.
    """
    return f"'{text}'.format([{', '.join(values)}])" if values else f"'{text}'"


def _with_nearest(text: str, rule: str, *, values: list[str], nearest: str) -> str:
    """Return an expression for `text; nearest that work: A, B [rule]`, where `nearest` is a list of up to two."""
    endings = ("", "; nearest that works: %d", "; nearest that work: %d, %d")
    texts = ", ".join(f"'{text}{ending} [{rule}]'" for ending in endings)
    return f"[{texts}][size({nearest})].format([{', '.join(values)}] + {nearest})"


def divisors(number: str, largest: int) -> str:
    """Return an expression for the list of all divisors of `number`, which is at most `largest`."""
    small = f"[{', '.join(map(str, range(1, isqrt(largest) + 1)))}].filter(d, {number} % d == 0)"
    return f"({small} + {small}.map(d, {number} / d))"


def nearest_two(candidates: str, found: str, fits: str = "true") -> str:
    """Return an expression for the closest candidate n below and above `found` that fits: a list of up to two.

    Candidates below are negated, so that `min` picks the closest on either side.
    """
    return (
        f"[{candidates}.filter(n, n < {found} && {fits}).map(n, -n), {candidates}.filter(n, n > {found} && {fits})]"
        ".filter(side, size(side) > 0).map(side, side.min() < 0 ? -side.min() : side.min())"
    )
