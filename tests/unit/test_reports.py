"""Reports: few writes, none lost, events at changes only."""

import asyncio
import copy
from typing import Any

import pytest

from dcp_operator.canary_checks import TransferChecks
from dcp_operator.metrics import OBJECTS, ObjectFacts
from dcp_operator.observed import Child, Key, Observed
from dcp_operator.pod_logs import PodLogs
from dcp_operator.reasons import Problem, Reason
from dcp_operator.reports import PAUSE_S, Reporter
from dcp_operator.status import is_same, may_wait, news
from tests.support.objects import owner
from tests.support.simulated_api import SimulatedApi

Body = dict[str, Any]


def status(generation: int = 1, *, ready: int = 0, **said: tuple[str, str]) -> Body:
    """Return a status with some conditions, given as (status, reason)."""
    conditions = {"Ready": ("False", "PodsPending"), "Available": ("False", "PodsPending"), **said}
    return {
        "observedGeneration": generation,
        "conditions": [
            {"type": kind, "status": what[0], "reason": what[1], "message": f"{kind} is {what[0]}"}
            for kind, what in conditions.items()
        ],
        "prefill": {"replicas": 4, "readyReplicas": ready},
    }


SERVING = ("True", "Serving")


def now() -> str:
    return "2026-01-01T00:00:00Z"


def wake(key: Key) -> None:
    """Nothing waits here."""


async def run(function, *arguments):
    return function(*arguments)


class Cluster:
    """What is stored, and a clock."""

    def __init__(self) -> None:
        self.stored: Body = {}
        self.now_s = 100.0
        self.writes = 0
        self.events: list[tuple[str, bool]] = []
        self.refusal: Problem | None = None
        logs, checks = PodLogs(SimulatedApi(), run), TransferChecks(None, wake, now)  # type: ignore[arg-type]
        self.reporter = Reporter(self, logs, checks, now, lambda: self.now_s)

    async def write_status(self, observed: Observed, status: Body) -> Problem | None:
        if self.refusal is None:
            self.writes += 1
            self.stored = copy.deepcopy(status)
        return self.refusal

    async def write_scaler_status(self, observed: Observed, scaler: Child, status: Body) -> Problem | None:
        return None

    async def record(self, observed: Observed, reason: str, message: str, *, is_warning: bool, now: str) -> None:
        self.events.append((reason, is_warning))

    def report(self, said: Body) -> tuple[Problem | None, float | None]:
        observed = Observed({**owner(), "status": self.stored})
        return asyncio.run(self.reporter.publish(observed, said))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_progress_is_written_at_most_once_a_second_and_its_last_word_is_not_lost(cluster: Cluster):
    assert cluster.report(status(ready=0)) == (None, None)
    due = []
    for ready in range(1, 5):
        cluster.now_s += 0.1
        _, wait_s = cluster.report(status(ready=ready))
        due.append(wait_s)
    assert cluster.writes == 1
    assert due == pytest.approx([0.9, 0.8, 0.7, 0.6])
    cluster.now_s += due[-1]
    assert cluster.report(status(ready=4)) == (None, None)
    assert cluster.writes == 2
    assert cluster.stored["prefill"]["readyReplicas"] == 4


@pytest.mark.parametrize("kind", ["Ready", "Available", "Progressing"])
def test_a_change_of_what_matters_is_written_at_once(cluster: Cluster, kind: str):
    cluster.report(status())
    cluster.now_s += 0.01
    assert cluster.report(status(**{kind: SERVING})) == (None, None)
    assert cluster.writes == 2


def test_a_new_generation_is_written_at_once(cluster: Cluster):
    cluster.report(status())
    assert cluster.report(status(2)) == (None, None)
    assert cluster.stored["observedGeneration"] == 2


def test_the_same_status_is_written_once(cluster: Cluster):
    for _ in range(100):
        cluster.report(status(Ready=SERVING))
        cluster.now_s += 10
    assert cluster.writes == 1
    assert len(cluster.events) == 1


def test_what_could_not_be_written_is_said_and_tried_again_without_a_pause(cluster: Cluster):
    cluster.refusal = Problem(Reason.API_UNAVAILABLE, "no answer")
    assert cluster.report(status()) == (cluster.refusal, None)
    assert cluster.events == []
    cluster.refusal = None
    assert cluster.report(status()) == (None, None)
    assert (cluster.writes, len(cluster.events)) == (1, 1)


def test_conditions_of_others_make_no_difference_and_their_edits_of_ours_do():
    ours = status(Ready=SERVING)
    theirs = {"type": "Theirs", "status": "True", "reason": "Theirs", "message": ""}
    stored = copy.deepcopy(ours)
    stored["conditions"].append(theirs)
    assert is_same(ours, stored)
    stored["conditions"][0]["message"] = "edited"
    assert not is_same(ours, stored)
    del stored["conditions"][0]
    assert not is_same(ours, stored)


def test_a_field_that_is_no_longer_said_is_a_difference():
    assert not is_same(status(), {**status(), "rollout": {"revisions": []}})


def test_progress_may_wait_and_nothing_else():
    assert may_wait(status(ready=1), status())
    assert not may_wait(status(Ready=SERVING), status())
    assert not may_wait(status(2), status())


CHANGES = {
    "the first status": ({}, status(), [("PodsPending", False)]),
    "one reason that takes time for another": (status(), status(Ready=("False", "Starting")), []),
    "it serves": (status(), status(Ready=SERVING, Available=SERVING), [("Serving", False)]),
    "requests are answered before all is ready": (status(), status(Available=SERVING), [("Serving", False)]),
    "trouble": (status(), status(Ready=("False", "CrashLoop")), [("CrashLoop", True)]),
    "other trouble": (
        status(Ready=("False", "CrashLoop")),
        status(Ready=("False", "Unschedulable")),
        [("Unschedulable", True)],
    ),
    "requests are answered no more, in a rollout": (
        status(Ready=("False", "RollingOut"), Available=SERVING),
        status(Ready=("False", "RollingOut"), Available=("False", "CapacityBelowFloor")),
        [("CapacityBelowFloor", True)],
    ),
    "another reason for the same lack": (
        status(Available=("False", "CapacityBelowFloor")),
        status(Available=("False", "PodsPending")),
        [],
    ),
    "a pause": (status(Ready=("False", "RollingOut")), status(Ready=("False", "Paused")), [("Paused", False)]),
    "another message": (
        status(Ready=SERVING),
        {**status(Ready=SERVING), "conditions": [{**status(Ready=SERVING)["conditions"][0], "message": "new"}]},
        [],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_one_event_and_progress_is_none(case: str):
    before, after, expected = CHANGES[case]
    assert [(each.reason.value, each.is_warning) for each in news(before, after)] == expected


def test_an_object_that_is_gone_is_in_no_metric(cluster: Cluster):
    cluster.reporter.leave_facts(Key("models", "gone"), ObjectFacts(status()))
    assert ("models", "gone") in OBJECTS.facts
    cluster.reporter.forget(Key("models", "gone"))
    assert ("models", "gone") not in OBJECTS.facts


def test_the_pause_is_a_second():
    assert PAUSE_S == 1.0
