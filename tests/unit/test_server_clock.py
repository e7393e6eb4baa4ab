"""The API server's clock, as its answers tell it."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dcp_operator.server_clock import ServerClock

WRONG = datetime(2031, 5, 5, 5, 5, 5, tzinfo=UTC)
RIGHT = datetime(2026, 1, 1, 12, tzinfo=UTC)


class World:
    """The API server's time, and a steady clock that runs beside it."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.clock = ServerClock(own=lambda: WRONG, steady_s=lambda: 1000 + self.passed_s)

    @property
    def real(self) -> datetime:
        return RIGHT + timedelta(seconds=self.passed_s)

    def answer(self) -> None:
        self.clock.hear(f"{self.real:%a, %d %b %Y %H:%M:%S} GMT")


def test_before_an_answer_the_machines_clock_is_all_there_is():
    assert World().clock.now() == "2031-05-05T05:05:05Z"


def test_an_answers_time_is_believed_and_runs_on_however_wrong_the_machines_clock_is():
    world = World()
    world.answer()
    assert world.clock.now() == "2026-01-01T12:00:00Z"
    world.passed_s = 61.5
    assert world.clock.now() == "2026-01-01T12:01:01Z"


def test_a_clock_of_the_server_that_is_set_is_followed():
    world = World()
    world.answer()
    world.clock.hear("Thu, 01 Jan 2026 15:00:00 GMT")
    assert world.clock.now() == "2026-01-01T15:00:00Z"


def test_an_answer_without_a_date_changes_nothing():
    world = World()
    world.answer()
    for nonsense in (None, "", "yesterday", "Thu, 99 Jan 2026 15:00:00 GMT"):
        world.clock.hear(nonsense)
    assert world.clock.now() == "2026-01-01T12:00:00Z"


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=40))
def test_it_is_less_than_a_second_behind_and_never_goes_back(steps: list[tuple[float, bool]]):
    world, told = World(), []
    world.answer()
    for seconds, is_answered in steps:
        world.passed_s += seconds
        if is_answered:
            world.answer()
        told.append(world.clock.now())
        said = datetime.strptime(told[-1], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        # A second for the fractions that Date lacks, one for those of the time as it is written.
        assert timedelta(0) <= world.real - said < timedelta(seconds=2)
    assert told == sorted(told)
