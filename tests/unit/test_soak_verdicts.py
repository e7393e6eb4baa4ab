"""What the soak may excuse, and what it makes of memory."""

from __future__ import annotations

import math

import pytest

from devcluster.completions import CompletionError
from tests.soak.memory import MIB, growth
from tests.soak.traffic import Record, Restarts, is_absence


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def restarts_from_10_to_30() -> Restarts:
    clock = Clock()
    restarts = Restarts(clock)
    clock.now = 10.0
    with restarts.window():
        clock.now = 30.0
    clock.now = 100.0
    return restarts


@pytest.mark.parametrize(
    ("began", "ended", "excused"),
    [
        (5.0, 9.9, False),
        (5.0, 10.0, True),
        (5.0, 50.0, True),
        (15.0, 20.0, True),
        (29.9, 40.0, True),
        (30.1, 40.0, False),
    ],
)
def test_a_request_is_excused_if_an_engine_was_away_in_its_time(began: float, ended: float, excused: bool) -> None:
    assert restarts_from_10_to_30().overlap(began, ended) is excused


def test_an_engine_that_is_back_disturbs_others_for_a_while_longer() -> None:
    restarts = restarts_from_10_to_30()
    assert restarts.overlap(40.0, 41.0, after_s=11.0)
    assert not restarts.overlap(42.0, 43.0, after_s=11.0)


def test_an_engine_that_is_not_back_yet_is_away() -> None:
    clock = Clock()
    restarts = Restarts(clock)
    assert not restarts.overlap(0.0, 1.0)
    with restarts.window():
        assert restarts.overlap(500.0, 501.0)


@pytest.mark.parametrize(
    ("error", "absent"),
    [
        (CompletionError("POST http://a:1/v1/completions got no answer: refused"), True),
        (CompletionError("POST http://a:1/v1/completions answered 500: EngineDeadError"), True),
        (CompletionError("POST http://a:1/v1/completions answered 400: no such model"), False),
        (ConnectionRefusedError("refused"), True),
        (AssertionError("two engines answer /query"), False),
        (KeyError("choices"), False),
    ],
)
def test_only_an_engine_that_does_not_answer_is_away(error: Exception, absent: bool) -> None:
    assert is_absence(error) is absent


def test_every_request_is_timed_and_disturbed_ones_count_apart() -> None:
    record = Record()
    record.add("right", 1.0, undisturbed=True)
    record.add("FAILED", 3.0, undisturbed=True, words="why")
    record.add("engine away", 9.0, undisturbed=False)
    assert (record.slowest_s, record.slowest_undisturbed_s) == (9.0, 3.0)
    assert record.words == ["why"]


def test_growth_is_taken_after_the_first_quarter_and_says_over_how_many_requests() -> None:
    filling = [(100 * number, 50 * MIB * number) for number in range(1, 4)]
    steady = [(1000 + 100 * number, 500 * MIB + MIB * number) for number in range(9)]
    taken = growth([*filling, *steady])
    assert math.isclose(taken.mib_per_1000, 10.0)
    assert taken.num_requests == 800


def test_too_few_samples_are_no_slope() -> None:
    with pytest.raises(ValueError, match="too few"):
        growth([(1, 1), (2, 2)])
