"""When a check of the KV transfer is due, with a clock that the test moves."""

import itertools
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from dcp_operator.canary.schedule import (
    GAP_S,
    RETRY_FIRST_S,
    RETRY_MAX_S,
    Attempts,
    Last,
    Subject,
    next_check,
    retry_pause,
)

A, B = Subject("aaaa", "1"), Subject("bbbb", "1")
RESTARTED = Subject("aaaa", "2")


def test_nothing_is_due_while_nothing_can_be_checked():
    assert next_check(None, 60.0, Last(A, is_verified=False, at_s=0.0), None, 1e9) is None


def test_what_was_never_checked_is_due_at_once():
    assert next_check(A, None, None, None, 100.0) == 100.0


def test_a_verified_revision_is_not_checked_again_by_itself():
    assert next_check(A, None, Last(A, is_verified=True, at_s=50.0), None, 1e9) is None


def test_an_interval_counts_from_the_last_check():
    assert next_check(A, 300.0, Last(A, is_verified=True, at_s=50.0), None, 60.0) == 350.0


def test_another_revision_and_restarted_engines_are_due_at_once_but_for_the_gap():
    last = Last(A, is_verified=True, at_s=50.0)
    for subject in (B, RESTARTED):
        assert next_check(subject, None, last, None, 1000.0) == 1000.0
        assert next_check(subject, None, last, None, 51.0) == 50.0 + GAP_S


def test_what_failed_is_tried_again_ever_later():
    last = Last(A, is_verified=False, at_s=100.0)
    dues = [next_check(A, None, last, Attempts(A, failures, 100.0), 100.0) for failures in range(1, 20)]
    pauses = [due - 100.0 for due in dues if due is not None]
    assert pauses[:3] == [30.0, 60.0, 120.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RETRY_MAX_S


def test_other_engines_end_the_pause_after_failures():
    assert next_check(B, None, Last(A, is_verified=False, at_s=90.0), Attempts(A, 9, 100.0), 200.0) == 200.0


def test_a_failure_that_is_known_from_the_status_alone_is_tried_again_soon():
    assert next_check(A, None, Last(A, is_verified=False, at_s=100.0), None, 100.0) == 100.0 + RETRY_FIRST_S


@dataclass
class World:
    """One object over simulated hours: what is checked, and when."""

    now: float = 0.0
    last: Last | None = None
    attempts: Attempts | None = None
    checks: list[tuple[float, Subject]] = field(default_factory=list)

    def advance(self, subject: Subject | None, seconds: float, interval_s: float | None, outcome: str) -> None:
        """Let time pass, making each check that is due at its time."""
        end = self.now + seconds
        while True:
            due = next_check(subject, interval_s, self.last, self.attempts, self.now)
            if due is None or subject is None or max(due, self.now) > end:
                break
            self.now = max(due, self.now)
            self.checks.append((self.now, subject))
            same = self.attempts is not None and self.attempts.subject == subject
            failures = 0 if outcome == "good" else 1 + (self.attempts.failures if same and self.attempts else 0)
            self.attempts = Attempts(subject, failures, self.now) if failures else None
            if outcome != "unknown":
                self.last = Last(subject, is_verified=outcome == "good", at_s=self.now)
        self.now = end


STEPS = st.lists(
    st.tuples(
        st.sampled_from([None, A, RESTARTED, B]),
        st.floats(0.0, 4000.0),
        st.sampled_from([None, 60.0, 600.0]),
        st.sampled_from(["good", "bad", "unknown"]),
    ),
    max_size=12,
)


@given(STEPS)
def test_checks_are_never_closer_than_the_gap_and_never_endless(steps):
    world = World()
    for step in steps:
        world.advance(*step)
    times = [at for at, _ in world.checks]
    assert all(later - earlier >= GAP_S - 1e-6 for earlier, later in itertools.pairwise(times))
    # As often as the shortest interval, once for each change, and the retries of each change.
    assert len(times) <= world.now / 60.0 + len(steps) * (2 + len([n for n in range(1, 20) if retry_pause(n) < 4000]))


@given(STEPS, st.sampled_from([A, B]))
def test_whatever_happened_a_serving_revision_is_verified_within_the_longest_pause(steps, subject):
    world = World()
    for step in steps:
        world.advance(*step)
    world.advance(subject, RETRY_MAX_S + GAP_S, None, "good")
    assert world.last is not None
    assert world.last.subject == subject
    assert world.last.is_verified
    count = len(world.checks)
    world.advance(subject, 1e6, None, "good")
    assert len(world.checks) == count, "a verified revision is left alone"
