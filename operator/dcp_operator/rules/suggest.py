"""The smallest change that makes a refused object one that is accepted: a search over what the rules propose.

Every error proposes changes of its own (`Problem.fixes`). The search begins with the object, applies one proposed
change at a time, asks all rules about the result, and goes on with the cheapest so far. It ends with an object that no
rule refuses, so a suggestion is right for the whole object. A change costs 1, and a little more the further a number
moves: one field changed by much goes before two fields changed by little.
"""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from dcp_operator.api.findings import Severity
from dcp_operator.api.load import load
from dcp_operator.api.spec import Spec
from dcp_operator.catalogue import Catalogue
from dcp_operator.rules.context import Problem, build_context
from dcp_operator.rules.edits import Absent, Fix, changed_body, value_at
from dcp_operator.rules.engine import problems_of

#: Objects that are judged before a way of searching gives up.
_MOST_OBJECTS: Final = 300
#: Values of a number that are tried on either side of what is stated.
_MOST_VALUES: Final = 6
#: What another connector costs beside the change itself: it replaces more than a number.
_OTHER_CONNECTOR: Final = 0.5
_REMOVED: Final = 0.05
#: How much more what is left counts than what was changed, for objects with many errors.
_GREEDY: Final = 3.0


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Changes that make an object accepted, in the order in which they are to be made, and the object after them.

    `REMOVED` as the value means that the field is left out. A path that names a position in a list counts in the list
    as the changes before it leave it.
    """

    changes: tuple[Fix, ...]
    body: dict[str, Any]

    @property
    def values(self) -> list[tuple[str, int | str | bool | tuple[str, ...] | None]]:
        """The changes as pairs of path and value; None where the field is left out."""
        return [(fix.path, None if isinstance(fix.value, Absent) else fix.value) for fix in self.changes]


@dataclass(frozen=True, slots=True)
class _State:
    changes: tuple[Fix, ...]
    cost: float
    body: dict[str, Any]
    spec: Spec
    errors: tuple[Problem, ...]


def suggest(body: Mapping[str, Any], *, catalogue: Catalogue | None = None) -> Suggestion | None:
    """Return the smallest change found that makes a document accepted.

    The change is empty for a document that is accepted already. None for one whose schema is wrong, and where the
    search finds nothing within its bound. Never fails, and never changes `body`.
    """
    start = _judge((), 0.0, dict(body), catalogue)
    if start is None:
        return None
    # One change that cures several errors is found by looking at all of them, many errors by one after the other.
    return _search(start, len(start.errors), 1.0, catalogue) or _search(start, 1, _GREEDY, catalogue)


def _search(start: _State, width: int, haste: float, catalogue: Catalogue | None) -> Suggestion | None:
    """Search on, from each object, with what its first `width` errors propose.

    With a `haste` of 1 the first object found is about the cheapest; with more it is found sooner.
    """
    order = count()
    frontier = [(start.cost + haste * _left(start), next(order), start)]
    seen = {_key(start)}
    judged = 0
    while frontier and judged < _MOST_OBJECTS:
        _, _, state = heapq.heappop(frontier)
        if not state.errors:
            return Suggestion(_once_each(state.changes), state.body)
        for fix, cost in _steps(state, width):
            judged += 1
            after = _apply(state, fix, cost, catalogue)
            if after is not None and _key(after) not in seen:
                seen.add(_key(after))
                heapq.heappush(frontier, (after.cost + haste * _left(after), next(order), after))
    return None


def _judge(changes: tuple[Fix, ...], cost: float, body: dict[str, Any], catalogue: Catalogue | None) -> _State | None:
    obj = load(body).obj
    if obj is None:
        return None
    found = problems_of(build_context(obj, catalogue))
    errors = tuple(problem for _, problem in found if problem.severity is Severity.ERROR)
    return _State(changes, cost, body, obj.spec, errors)


def _apply(state: _State, fix: Fix, cost: float, catalogue: Catalogue | None) -> _State | None:
    try:
        body = changed_body(state.body, fix)
    except (LookupError, TypeError, AttributeError):
        return None
    return _judge((*state.changes, fix), state.cost + cost, body, catalogue)


def _left(state: _State) -> int:
    """Return about how many changes an object still needs: one for each field that has an error."""
    return len({problem.path for problem in state.errors})


def _once_each(changes: tuple[Fix, ...]) -> tuple[Fix, ...]:
    """Return the changes without those that a later one of the same field replaces; items of lists go one by one."""
    last = {fix.path: index for index, fix in enumerate(changes)}
    return tuple(fix for index, fix in enumerate(changes) if fix.path.endswith("]") or last[fix.path] == index)


def _key(state: _State) -> str:
    return repr(state.body)


def _steps(state: _State, width: int) -> Iterator[tuple[Fix, float]]:
    """Yield the changes proposed for the first errors, each with its cost.

    An error without a proposal is passed over: another field's change may cure it.
    """
    done: set[Fix] = set()
    for problem in [each for each in state.errors if each.fixes][: max(width, 1)]:
        for fix, cost in _proposals(state.spec, problem):
            if fix not in done:
                done.add(fix)
                yield fix, cost


def _proposals(spec: Spec, problem: Problem) -> Iterator[tuple[Fix, float]]:
    for path in dict.fromkeys(fix.path for fix in problem.fixes):
        found = value_at(spec, path) if path.startswith("spec.") and "[" not in path else None
        costs = sorted(
            ((fix, _cost(fix, found)) for fix in problem.fixes if fix.path == path), key=lambda pair: pair[1]
        )
        yield from costs[: 2 * _MOST_VALUES]


def _cost(fix: Fix, found: object) -> float:
    if isinstance(fix.value, Absent):
        return 1 + _REMOVED
    if fix.path == "spec.kvConnector.type":
        return 1 + _OTHER_CONNECTOR
    if isinstance(fix.value, int) and isinstance(found, int) and fix.value > 0 and found > 0:
        # A size that is kept large serves more than one that falls to 1.
        return 1 + abs(math.log2(fix.value / found)) / 32
    return 1.0
