"""Events: one that is said again is counted, one that has expired is made anew, a failure harms nothing."""

import asyncio

from dcp_operator import events
from dcp_operator.client import ApiError
from dcp_operator.events import Recorder
from dcp_operator.observed import Observed
from tests.support.objects import owner
from tests.support.simulated_api import SimulatedApi


async def call(function, *arguments):
    return function(*arguments)


def record(recorder: Recorder, reason: str = "Serving", message: str = "all is well", now: str = "early") -> None:
    asyncio.run(recorder.record(Observed(owner()), reason, message, is_warning=False, now=now))


def test_an_event_that_is_said_again_is_counted():
    api = SimulatedApi()
    recorder = Recorder(api, call)
    for now in ("early", "later", "late"):
        record(recorder, now=now)
    [event] = api.events
    assert (event["count"], event["firstTimestamp"], event["lastTimestamp"]) == (3, "early", "late")
    assert event["involvedObject"]["uid"] == "owner-uid"


def test_another_reason_or_message_is_another_event():
    api = SimulatedApi()
    recorder = Recorder(api, call)
    record(recorder)
    record(recorder, message="all is well again")
    record(recorder, reason="PodsPending")
    assert [event["count"] for event in api.events] == [1, 1, 1]


def test_an_event_that_has_expired_is_made_anew():
    api = SimulatedApi()
    recorder = Recorder(api, call)
    record(recorder)
    api.events.clear()
    record(recorder)
    assert [event["count"] for event in api.events] == [1]


def test_an_event_that_is_refused_is_forgotten():
    api = SimulatedApi()
    recorder = Recorder(api, call)

    def refuse(*arguments):
        raise ApiError(403, "Forbidden", "no events for you")

    api.create_event = refuse  # type: ignore[method-assign]
    record(recorder)
    del api.create_event
    record(recorder)
    assert len(api.events) == 1


def test_no_more_events_are_remembered_than_some(monkeypatch):
    monkeypatch.setattr(events, "_REMEMBERED", 3)
    recorder = Recorder(SimulatedApi(), call)
    for number in range(10):
        record(recorder, message=str(number))
    assert len(recorder._stored) == 3
