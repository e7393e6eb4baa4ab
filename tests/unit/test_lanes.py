"""Lanes: a peer's jobs one at a time, peers side by side, and jobs that wait hold no thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dcp_connector.lanes import Lanes
from tests.support.transfer_memory import wait_for


class Turns:
    """A job that does what it is told in each turn and is over after the last one."""

    def __init__(self, lane: str, *turns: Callable[[], None]) -> None:
        self.lane = self.group = lane
        self._turns = list(turns)
        self.taken = 0

    def turn(self) -> bool:
        self._turns[self.taken]()
        self.taken += 1
        return self.taken == len(self._turns)


def nothing() -> None:
    pass


def finished(job: Turns, turns: int) -> None:
    wait_for(lambda: job.taken == turns, 10, f"{job.taken} of {turns} turns were taken")


def test_a_parked_job_lets_the_next_one_of_its_lane_go_on_with_a_single_thread() -> None:
    lanes = Lanes(1, "test")
    waiting, following = Turns("peer", nothing, nothing), Turns("peer", nothing)
    lanes.add(waiting)
    wait_for(lambda: lanes.parked() == [waiting], 10, "the job did not park")
    lanes.add(following)
    finished(following, 1)
    lanes.wake(waiting)
    finished(waiting, 2)
    lanes.close()
    assert lanes.parked() == []


def test_a_job_that_is_woken_while_it_runs_gets_another_turn() -> None:
    lanes = Lanes(1, "test")
    running, woken = threading.Event(), threading.Event()

    def first() -> None:
        running.set()
        assert woken.wait(10)

    job = Turns("peer", first, nothing)
    lanes.add(job)
    assert running.wait(10)
    lanes.wake(job)
    woken.set()
    finished(job, 2)
    lanes.close()


def test_jobs_of_one_lane_never_run_at_the_same_time_and_lanes_do() -> None:
    lanes = Lanes(4, "test")
    together = threading.Barrier(2)
    running: set[str] = set()

    def meet(name: str) -> Callable[[], None]:
        def turn() -> None:
            assert name not in running
            running.add(name)
            together.wait(10)
            running.remove(name)

        return turn

    jobs = [Turns(name, meet(name)) for name in ("a", "b") for _ in range(5)]
    for job in jobs:
        lanes.add(job)
    for job in jobs:
        finished(job, 1)
    lanes.close()


def test_waking_what_is_over_or_was_never_there_does_nothing() -> None:
    lanes = Lanes(1, "test")
    job = Turns("peer", nothing)
    lanes.wake(job)
    lanes.add(job)
    finished(job, 1)
    lanes.close()
    lanes.wake(job)
    lanes.add(Turns("peer", nothing))
    assert job.taken == 1
