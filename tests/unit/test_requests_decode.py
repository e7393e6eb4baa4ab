"""The life of a load on a decode rank, event by event."""

from __future__ import annotations

import pytest

from dcp_connector import decode_worker
from dcp_connector.config import ConnectorConfig
from dcp_connector.errors import PeerError, Reason
from dcp_connector.requests_decode import (
    Abandon,
    Ask,
    Cleared,
    DecodeRequests,
    Finished,
    Probe,
    Resolve,
    Send,
    with_budget,
)
from dcp_connector.wire import Done, Failed, Settled
from tests.support.transfer_messages import a_cancel, a_load, a_pull

LOAD = a_load()
ASKS = (Ask("tcp://a:1", a_pull("p0")), Ask("tcp://b:1", a_pull("p1")))
GOOD = Finished(LOAD, None, "", aborted=False, confirmed=True)


@pytest.fixture
def requests() -> DecodeRequests:
    made = DecodeRequests(request_timeout_s=60.0, cancel_grace_s=5.0, longest_write_s=300.0)
    assert made.load(LOAD, 0) == [Resolve(LOAD)]
    return made


def asked(requests: DecodeRequests, now: float = 0.0) -> DecodeRequests:
    requests.resolved("request", ASKS, now)
    return requests


def cancels(*numbers: int) -> list[Send]:
    return [Send(ASKS[number].address, a_cancel(ASKS[number].pull)) for number in numbers]


def finished(reason: Reason, detail: str, *, aborted: bool = False, confirmed: bool = True) -> Finished:
    return Finished(LOAD, reason, detail, aborted, confirmed)


def test_every_source_is_asked_with_what_is_left_of_the_time(requests: DecodeRequests) -> None:
    sends = requests.resolved("request", ASKS, 10)
    assert sends == [Send(ask.address, with_budget(ask.pull, 50)) for ask in ASKS]


def test_a_load_is_good_when_all_sources_are_done(requests: DecodeRequests) -> None:
    asked(requests)
    assert requests.done(Done("p0", 1), 1) == []
    assert requests.done(Done("p1", 1), 1) == [GOOD]
    assert requests.num_loading == 0


def test_a_rank_without_sources_is_finished_at_once(requests: DecodeRequests) -> None:
    assert requests.resolved("request", (), 1) == [GOOD]


def test_repeated_and_unknown_answers_change_nothing(requests: DecodeRequests) -> None:
    asked(requests)
    requests.done(Done("p0", 1), 1)
    assert requests.done(Done("p0", 1), 1) == []
    assert requests.settled(Settled("p0"), 1) == []
    assert requests.failed(Failed("never asked", Reason.INTERNAL, ""), 1) == []
    assert requests.done(Done("p1", 1), 1) == [GOOD]
    assert requests.done(Done("p1", 1), 1) == []


def test_sources_that_cannot_be_found_fail_the_load(requests: DecodeRequests) -> None:
    error = PeerError(Reason.BOOTSTRAP_UNREACHABLE, "gone")
    assert requests.unresolved("request", error, 1) == [finished(Reason.BOOTSTRAP_UNREACHABLE, "gone")]
    assert requests.resolved("request", ASKS, 1) == []


def test_a_peer_that_does_not_fit_is_told_that_nothing_will_be_asked_for(requests: DecodeRequests) -> None:
    error = PeerError(Reason.INCOMPATIBLE, "words")
    assert requests.unresolved("request", error, 1) == [finished(Reason.INCOMPATIBLE, "words"), Abandon(LOAD)]


def test_one_failure_cancels_the_other_sources_and_waits_for_them(requests: DecodeRequests) -> None:
    asked(requests)
    assert requests.failed(Failed("p0", Reason.TRANSFER_ERROR, "broken"), 1) == cancels(1)
    assert requests.settled(Settled("p1"), 1) == [finished(Reason.TRANSFER_ERROR, "broken")]


def test_at_the_deadline_the_writers_are_told_to_stop_and_the_blocks_stay_theirs(requests: DecodeRequests) -> None:
    asked(requests)
    assert requests.next_timer() == 60
    assert requests.tick(60) == cancels(0, 1)
    assert requests.settled(Settled("p0"), 1) == []
    assert requests.done(Done("p1", 1), 1) == [finished(Reason.DEADLINE, "the KV did not arrive within 60 s")]


def unconfirmed(requests: DecodeRequests) -> DecodeRequests:
    """The deadline passed at 60 and the grace at 65: the load is finished, and neither source has answered."""
    asked(requests)
    requests.tick(60)
    requests.tick(65)
    return requests


def test_a_request_waits_for_a_silent_writer_no_longer_than_the_grace(requests: DecodeRequests) -> None:
    asked(requests)
    requests.tick(60)
    assert requests.tick(64.9) == []
    over = finished(Reason.DEADLINE, "the KV did not arrive within 60 s", confirmed=False)
    assert requests.tick(65) == [over, *cancels(0, 1), Probe("tcp://a:1"), Probe("tcp://b:1")]
    assert requests.num_loading == 0


def test_its_blocks_wait_until_every_writer_has_answered(requests: DecodeRequests) -> None:
    unconfirmed(requests)
    assert requests.settled(Settled("p0"), 66) == []
    assert requests.done(Done("p1", 1), 67) == [Cleared(LOAD, confirmed=True)]
    assert requests.tick(1000) == []


def test_silent_writers_are_asked_again_after_every_grace(requests: DecodeRequests) -> None:
    unconfirmed(requests)
    requests.settled(Settled("p0"), 66)
    assert requests.next_timer() == 70
    assert requests.tick(70) == [*cancels(1), Probe("tcp://b:1")]
    assert requests.tick(75) == [*cancels(1), Probe("tcp://b:1")]


def test_a_writer_that_never_answers_keeps_the_blocks_for_as_long_as_it_could_write(requests: DecodeRequests) -> None:
    unconfirmed(requests)
    now = 65.0
    while now < 355:
        now += 5
        assert Cleared(LOAD, confirmed=False) not in requests.tick(now)
    assert requests.tick(360) == [Cleared(LOAD, confirmed=False)]
    assert requests.settled(Settled("p0"), 361) == []
    assert requests.next_timer() is None or requests.tick(1000) == []


def test_a_writer_whose_process_has_ended_keeps_the_blocks_for_the_grace(requests: DecodeRequests) -> None:
    unconfirmed(requests)
    requests.settled(Settled("p1"), 66)
    assert requests.gone("tcp://a:1", 67) == []
    assert requests.tick(71.9) == []
    assert requests.tick(72) == [Cleared(LOAD, confirmed=True)]


def test_a_process_that_ends_before_the_deadline_ends_the_request_at_once(requests: DecodeRequests) -> None:
    asked(requests)
    assert requests.peer_lost("tcp://a:1", "gone", 1) == [*cancels(0, 1), Probe("tcp://a:1")]
    assert requests.settled(Settled("p1"), 2) == []
    assert requests.gone("tcp://a:1", 3) == [finished(Reason.PEER_LOST, "gone", confirmed=False)]
    assert requests.tick(8) == [Cleared(LOAD, confirmed=True)]


def test_blocks_of_a_failed_batch_wait_until_its_stragglers_are_over(requests: DecodeRequests) -> None:
    asked(requests)
    requests.failed(Failed("p0", Reason.TRANSFER_ERROR, "broken", 30.0), 1)
    over = finished(Reason.TRANSFER_ERROR, "broken", confirmed=False)
    assert requests.settled(Settled("p1"), 2) == [over]
    assert requests.tick(30.9) == []
    assert requests.tick(31) == [Cleared(LOAD, confirmed=True)]


def test_a_request_whose_blocks_are_not_clear_is_not_loaded_again(requests: DecodeRequests) -> None:
    unconfirmed(requests)
    assert requests.load(LOAD, 66) == []
    assert requests.num_unclear == 1


def test_a_deadline_before_the_sources_are_known_ends_the_load_at_once(requests: DecodeRequests) -> None:
    assert requests.tick(60) == [finished(Reason.DEADLINE, "the KV did not arrive within 60 s"), Abandon(LOAD)]


def test_an_abort_is_finished_when_the_writers_have_stopped(requests: DecodeRequests) -> None:
    asked(requests)
    assert requests.abort("request", 1) == cancels(0, 1)
    requests.settled(Settled("p0"), 1)
    gone = finished(Reason.CANCELLED, "decode gave the request up", aborted=True)
    assert requests.settled(Settled("p1"), 1) == [gone]


def test_an_abort_before_anything_was_asked_ends_at_once(requests: DecodeRequests) -> None:
    gone = finished(Reason.CANCELLED, "decode gave the request up", aborted=True)
    assert requests.abort("request", 1) == [gone, Abandon(LOAD)]


def test_an_abort_of_a_request_that_is_not_loading_is_ignored(requests: DecodeRequests) -> None:
    assert requests.abort("unknown", 1) == []


def test_a_lost_connection_ends_the_load_within_the_grace_instead_of_the_deadline(requests: DecodeRequests) -> None:
    asked(requests)
    assert requests.peer_lost("tcp://a:1", "gone", 1) == [*cancels(0, 1), Probe("tcp://a:1")]
    requests.settled(Settled("p1"), 1)
    over = finished(Reason.PEER_LOST, "gone", confirmed=False)
    assert requests.tick(6) == [over, *cancels(0), Probe("tcp://a:1")]


def test_a_lost_connection_to_a_source_that_is_done_does_no_harm(requests: DecodeRequests) -> None:
    asked(requests)
    requests.done(Done("p0", 1), 1)
    assert requests.peer_lost("tcp://a:1", "gone", 1) == []
    assert requests.done(Done("p1", 1), 1) == [GOOD]


def test_a_request_that_is_loading_is_not_loaded_twice(requests: DecodeRequests) -> None:
    assert requests.load(LOAD, 1) == []


def test_the_settings_say_how_long_blocks_stay_out_of_use_at_most() -> None:
    words = ConnectorConfig.model_fields["cancel_grace_s"].description
    assert f"or {decode_worker._LONGEST_WRITE_S:.0f} s after the request's deadline" in str(words)
