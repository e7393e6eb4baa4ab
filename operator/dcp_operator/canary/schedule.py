"""When a check is due: after Ready, after each rollout, after engines restarted or were replaced, and by an interval.

Checks of one object are at least GAP_S apart. One that failed or could not be made is tried again, at first soon and
then ever later, so that an object that can't be checked costs next to nothing. Other engines begin anew.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

#: Least time between two checks of one object, in seconds.
GAP_S: Final = 15.0
#: Pauses after checks that did not verify the transfer: the first, and the longest.
RETRY_FIRST_S: Final = 30.0
RETRY_MAX_S: Final = 3600.0


class Subject(NamedTuple):
    """What a check speaks about: a revision, and its ready engines (`engines` differs as soon as one of them does)."""

    revision: str
    engines: str


@dataclass(frozen=True, slots=True)
class Last:
    """The last check that told something about the transfer, and when, by a clock that never goes back."""

    subject: Subject
    is_verified: bool
    at_s: float


@dataclass(frozen=True, slots=True)
class Attempts:
    """Checks of one subject since the last one that verified the transfer: how many, and when the latest ended."""

    subject: Subject
    failures: int
    last_s: float


def next_check(
    subject: Subject | None, interval_s: float | None, last: Last | None, attempts: Attempts | None, now_s: float
) -> float | None:
    """Return when the next check is due, by the same clock: at or before `now_s` is at once, None is not by itself.

    `subject` is None while nothing can be checked: Ready is not True, there is no router, or no check is wanted.
    """
    if subject is None:
        return None
    due_s = _due(subject, interval_s, last, attempts, now_s)
    if due_s is None:
        return None
    gaps = [each + GAP_S for each in (last and last.at_s, attempts and attempts.last_s) if each is not None]
    return max([due_s, *gaps])


def retry_pause(failures: int) -> float:
    """Return the pause after so many checks in a row that did not verify the transfer, in seconds."""
    return min(RETRY_FIRST_S * 2.0 ** min(max(failures, 1) - 1, 16), RETRY_MAX_S)


def _due(
    subject: Subject, interval_s: float | None, last: Last | None, attempts: Attempts | None, now_s: float
) -> float | None:
    if attempts is not None and attempts.subject == subject and attempts.failures:
        return attempts.last_s + retry_pause(attempts.failures)
    if last is None or last.subject != subject:
        return now_s
    if not last.is_verified:
        return last.at_s + retry_pause(1)
    return None if interval_s is None else last.at_s + interval_s
