"""The nearest values behind a message: of the changes that a rule proposes, those that work for the whole object.

A change works if the finding goes, no other comes, and no rule has anything left to say against the field: every rule
is asked again about the changed object. The search is bounded, because an admission webhook has no time to lose.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from dcp_operator.api.findings import Severity
from dcp_operator.rules.context import Context, Problem, Rule
from dcp_operator.rules.edits import Absent, Fix, is_typed, value_at

#: Changes that are tried on either side of a value, and changes that are tried for one object in all.
_MOST_TRIES_A_SIDE: Final = 8
_MOST_TRIES: Final = 48
_NO_SINGLE_VALUE: Final = "; no single value works, dcpctl validate --suggest looks for several changes"

#: What tells one finding from another: the rule and the path.
Key = tuple[str, str]


def errors_of(context: Context, rules: Iterable[Rule]) -> Iterator[tuple[Rule, Problem]]:
    """Yield everything that refuses the object."""
    for rule in rules:
        for problem in rule.check(context):
            if problem.severity is Severity.ERROR:
                yield rule, problem


class Nearest:
    """Finds the end of messages about one object; the tries of all its findings are counted together."""

    def __init__(self, context: Context, rules: tuple[Rule, ...], before: frozenset[Key]) -> None:
        self._context = context
        self._rules = rules
        self._before = before
        self._tries = 0
        #: Whether the search of the present finding left changes untried.
        self._is_cut = False

    def words(self, rule: Rule, problem: Problem) -> str:
        """Return `; nearest that work: 2, 4` for a finding, or nothing where it proposes no values."""
        typed = [fix for fix in problem.fixes if not isinstance(fix.value, tuple) and is_typed(fix.path)]
        proposed = [fix for fix in typed if not isinstance(fix.value, Absent)]
        if not proposed:
            return ""

        def works(fix: Fix) -> bool:
            return self._works(fix, (rule.id, problem.path))

        found: list[Fix] = []
        self._is_cut = False
        for path in dict.fromkeys(fix.path for fix in proposed):
            found += self._of_one_field(path, [fix for fix in proposed if fix.path == path], works)
        if found:
            return _words(found, problem.path)
        left_out = next((fix for fix in typed if isinstance(fix.value, Absent) and works(fix)), None)
        if left_out is not None:
            return f"; leave {'it' if left_out.path == problem.path else left_out.path} out"
        # Nothing is said of values that the search had no time for.
        return "" if self._is_cut else _NO_SINGLE_VALUE

    def _of_one_field(self, path: str, fixes: list[Fix], works: Callable[[Fix], bool]) -> Iterator[Fix]:
        """Yield the closest change on either side of a number, or the first of other values, that works."""
        for side in _by_distance(fixes, value_at(self._context.spec, path)):
            self._is_cut |= len(side) > _MOST_TRIES_A_SIDE
            yield from islice(filter(works, side[:_MOST_TRIES_A_SIDE]), 1)

    def _works(self, fix: Fix, key: Key) -> bool:
        if self._tries >= _MOST_TRIES:
            self._is_cut = True
            return False
        self._tries += 1
        # What is left may be about other fields only: a value that another rule forbids is none to name.
        allowed = {(rule, path) for rule, path in self._before if path != fix.path} - {key}
        changed = self._context.changed(fix)
        return all((rule.id, problem.path) in allowed for rule, problem in errors_of(changed, self._rules))


def _by_distance(fixes: list[Fix], found: object) -> Iterator[list[Fix]]:
    """Yield the changes of a field in groups of which one is wanted from each, the best first."""
    numbers = [(fix.value, fix) for fix in fixes if isinstance(fix.value, int) and not isinstance(fix.value, bool)]
    if isinstance(found, int) and numbers:
        yield [fix for value, fix in sorted(numbers, key=lambda pair: -pair[0]) if value < found]
        yield [fix for value, fix in sorted(numbers, key=lambda pair: pair[0]) if value > found]
    else:
        yield from ([fix] for fix in fixes)


def _words(fixes: list[Fix], path: str) -> str:
    own = ", ".join(_value(fix) for fix in fixes if fix.path == path)
    elsewhere = dict.fromkeys(fix.path for fix in fixes if fix.path != path)
    others = [f"{' or '.join(_value(fix) for fix in fixes if fix.path == other)} in {other}" for other in elsewhere]
    named = [*([f"{own} here" if others else own] if own else []), *others]
    return f"; nearest that work{'s' if len(fixes) == 1 else ''}: {', or '.join(named)}"


def _value(fix: Fix) -> str:
    return str(fix.value).lower() if isinstance(fix.value, bool) else str(fix.value)
