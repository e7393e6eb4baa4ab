"""A brake on writes that don't last: another controller that keeps undoing them must not make the two race.

The first repetitions are free, because people delete and edit things several times in a row and expect them repaired
at once. After them a repetition waits, longer each time; whatever else the object needs is not held up. The clock is
given.
"""

from dataclasses import dataclass
from typing import Final

from dcp_operator.kinds import Ref
from dcp_operator.plan import Action, Plan

#: Times that the same is done for the same cause before it has to wait.
FREE: Final = 10
#: The first wait and the longest, in seconds.
FIRST_S: Final = 1.0
MAX_S: Final = 60.0
#: What is not needed again for so much longer than twice its wait has lasted, in seconds.
LASTED_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Done:
    times: int
    at: float

    @property
    def wait_s(self) -> float:
        return 0.0 if self.times < FREE else min(FIRST_S * 2 ** min(self.times - FREE, 10), MAX_S)

    def has_lasted(self, now: float) -> bool:
        return now - self.at > 2 * self.wait_s + LASTED_S


class Brake:
    """What was done for one object, by what was done and why."""

    def __init__(self) -> None:
        self._done: dict[tuple[Ref, str], _Done] = {}

    def admit(self, plan: Plan, now: float) -> tuple[Plan, float | None]:
        """Return the plan without what has to wait, and in how many seconds the first of that is due (None: nothing).

        `now` is of a monotonic clock, in seconds.
        """
        self._done = {cause: done for cause, done in self._done.items() if not done.has_lasted(now)}
        waits = {cause: self._wait_s(cause, now) for cause in map(_cause, plan.actions)}
        admitted = tuple(action for action in plan.actions if waits[_cause(action)] <= 0)
        return Plan(admitted, plan.blocked), min((wait for wait in waits.values() if wait > 0), default=None)

    def record(self, plan: Plan, now: float) -> list[tuple[Action, float]]:
        """Take in that a plan was carried out; return which of its actions have to wait if needed again, in seconds."""
        for cause in map(_cause, plan.actions):
            before = self._done.get(cause)
            self._done[cause] = _Done(1 + (before.times if before is not None else 0), now)
        waits = [(action, self._done[_cause(action)].wait_s) for action in plan.actions]
        return [(action, wait) for action, wait in waits if wait > 0]

    def _wait_s(self, cause: tuple[Ref, str], now: float) -> float:
        done = self._done.get(cause)
        return done.at + done.wait_s - now if done is not None else 0.0


def _cause(action: Action) -> tuple[Ref, str]:
    return action.ref, action.why
