"""The life of a transfer on a prefill rank, event by event."""

from __future__ import annotations

import pytest

from dcp_connector import requests_prefill
from dcp_connector.errors import PeerError, Reason
from dcp_connector.requests_prefill import Halt, Hold, PrefillRequests, Reply, Sent, Write, Written
from dcp_connector.wire import Done, Failed, Pull, Settled
from tests.support.transfer_messages import ENGINE, a_cancel, a_hold, a_pull, a_release

A, B = b"rank 0", b"rank 1"
BAD = Written(0, PeerError(Reason.TRANSFER_ERROR, "broken"))


def admit(pull: Pull, hold: Hold) -> frozenset[int]:
    if pull.digest == b"other":
        raise PeerError(Reason.OTHER_PROMPT, "another prompt")
    return frozenset({0, 1})


@pytest.fixture
def requests() -> PrefillRequests:
    return PrefillRequests(ENGINE, 0, lease_s=100.0, admit=admit)


def pull(number: int, **fields: object) -> Pull:
    return a_pull(**{"pull_id": f"pull-{number}", "decode_rank": number, **fields})


def answers(actions: list[object]) -> list[object]:
    return [action.message for action in actions if isinstance(action, Reply)]


def test_blocks_are_given_back_when_every_served_rank_is_settled(requests: PrefillRequests) -> None:
    assert requests.hold(a_hold(), 0) == []
    assert requests.pull(A, pull(0), 1) == [Write(pull(0), a_hold(), 61)]
    assert requests.pull(B, pull(1), 2) == [Write(pull(1), a_hold(), 62)]
    assert requests.written("transfer", "pull-0", Written(10), 3) == [Reply(A, Done("pull-0", 10))]
    assert requests.written("transfer", "pull-1", Written(20), 4) == [
        Reply(B, Done("pull-1", 20)),
        Sent("request", None),
    ]
    assert requests.num_held == 0


def test_a_pull_that_comes_before_the_prompt_waits_for_it(requests: PrefillRequests) -> None:
    assert requests.pull(A, pull(0), 0) == []
    assert requests.num_waiting == 1
    assert requests.hold(a_hold(), 5) == [Write(pull(0), a_hold(), 60)]


def test_a_pull_whose_prompt_never_comes_is_forgotten_whatever_the_clock_began_with(
    requests: PrefillRequests,
) -> None:
    requests.pull(A, pull(0, budget_s=7.0), -1000)
    requests.tick(-1000 + 7 + 100)
    assert requests.num_waiting == 0


def test_a_parked_pull_is_answered_at_its_deadline(requests: PrefillRequests) -> None:
    requests.pull(A, pull(0, budget_s=7.0), 0)
    assert requests.next_timer() == 7
    (failed,) = answers(requests.tick(7))
    assert isinstance(failed, Failed)
    assert failed.reason is Reason.DEADLINE


def test_a_prompt_that_comes_after_all_askers_gave_up_is_given_back_at_once(requests: PrefillRequests) -> None:
    for number, peer in ((0, A), (1, B)):
        requests.pull(peer, pull(number), 0)
        assert requests.cancel(peer, a_cancel(pull(number)), 1) == [Reply(peer, Settled(f"pull-{number}"))]
    assert requests.hold(a_hold(), 2) == [Sent("request", Reason.CANCELLED)]


def test_a_prompt_that_nobody_asks_for_is_given_back_when_the_lease_is_over(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    assert requests.tick(99.9) == []
    assert requests.tick(100) == [Sent("request", Reason.LEASE_EXPIRED)]
    (failed,) = answers(requests.pull(A, pull(0), 101))
    assert isinstance(failed, Failed)
    assert failed.reason is Reason.LEASE_EXPIRED


def test_a_lease_that_runs_out_during_a_write_waits_for_the_write(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    requests.pull(A, pull(0, budget_s=500.0), 99)
    assert requests.tick(100) == []
    actions = requests.written("transfer", "pull-0", Written(1), 120)
    assert actions == [Reply(A, Done("pull-0", 1)), Sent("request", Reason.LEASE_EXPIRED)]


def test_cancelling_a_running_write_is_confirmed_only_when_it_has_stopped(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    requests.pull(A, pull(0), 0)
    assert requests.cancel(A, a_cancel(pull(0)), 1) == [Halt("pull-0")]
    stopped = Written(0, PeerError(Reason.CANCELLED, "halted"))
    assert requests.written("transfer", "pull-0", stopped, 2) == [Reply(A, Settled("pull-0"))]


def test_a_cancel_that_overtakes_its_pull_makes_the_pull_do_nothing(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    assert requests.cancel(A, a_cancel(pull(0)), 1) == [Reply(A, Settled("pull-0"))]
    assert not [action for action in requests.pull(A, pull(0), 2) if isinstance(action, Write)]


def test_a_repeated_pull_is_written_once_and_answered_again(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    assert len(requests.pull(A, pull(0), 0)) == 1
    assert requests.pull(A, pull(0), 1) == []
    requests.written("transfer", "pull-0", Written(10), 2)
    assert requests.pull(A, pull(0), 3) == [Reply(A, Done("pull-0", 10))]


def test_an_answer_is_repeated_after_the_transfer_has_ended(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    for number, peer in ((0, A), (1, B)):
        requests.pull(peer, pull(number), 0)
        requests.written("transfer", f"pull-{number}", Written(10), 1)
    assert requests.cancel(A, a_cancel(pull(0)), 2) == [Reply(A, Done("pull-0", 10))]
    assert requests.pull(A, pull(0), 3) == [Reply(A, Done("pull-0", 10))]


def test_an_aborted_prompt_is_told_to_whoever_waits_and_to_whoever_comes_later(requests: PrefillRequests) -> None:
    requests.pull(A, pull(0), 0)
    first = answers(requests.drop("transfer", Reason.PREFILL_ABORTED, 1))
    later = answers(requests.pull(B, pull(1), 2))
    assert [failed.reason for failed in first + later] == [Reason.PREFILL_ABORTED] * 2


def test_another_prompts_asker_fails_and_the_right_one_is_still_served(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    stranger = pull(0, pull_id="stranger", digest=b"other", decode_engine="stranger")
    (failed,) = answers(requests.pull(B, stranger, 1))
    assert isinstance(failed, Failed)
    assert failed.reason is Reason.OTHER_PROMPT
    assert [type(action) for action in requests.pull(A, pull(0), 2)] == [Write]


def test_a_second_engine_under_the_same_id_is_refused(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    requests.pull(A, pull(0), 0)
    (failed,) = answers(requests.pull(B, pull(1, decode_engine="stranger"), 1))
    assert isinstance(failed, Failed)
    assert failed.reason is Reason.REUSED_TRANSFER_ID


def test_a_second_pull_of_a_rank_is_refused(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    requests.pull(A, pull(0), 0)
    (failed,) = answers(requests.pull(A, pull(0, pull_id="again"), 1))
    assert isinstance(failed, Failed)
    assert failed.reason is Reason.REUSED_TRANSFER_ID


def test_blocks_stay_while_a_rank_that_failed_before_is_being_served_again(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    requests.pull(A, pull(0), 0)
    requests.written("transfer", "pull-0", BAD, 1)
    assert [type(action) for action in requests.pull(A, pull(0, pull_id="again"), 2)] == [Write]
    requests.pull(B, pull(1), 3)
    assert requests.written("transfer", "pull-1", Written(1), 4) == [Reply(B, Done("pull-1", 1))]
    assert Sent("request", Reason.TRANSFER_ERROR) in requests.written("transfer", "again", Written(1), 5)


def test_a_release_gives_the_blocks_back(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    assert requests.release(a_release(), 1) == [Sent("request", Reason.RELEASED)]


def test_a_release_that_comes_before_the_prompt_gives_it_back_as_soon_as_it_is_there(
    requests: PrefillRequests,
) -> None:
    assert requests.release(a_release(), 0) == []
    assert requests.hold(a_hold(), 1) == [Sent("request", Reason.RELEASED)]


def test_a_release_waits_for_a_running_write(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    requests.pull(A, pull(0), 0)
    assert requests.release(a_release(), 1) == []
    assert Sent("request", Reason.RELEASED) in requests.written("transfer", "pull-0", Written(1), 2)


def test_a_strangers_release_is_ignored(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    requests.pull(A, pull(0), 0)
    assert requests.release(a_release(decode_engine="stranger"), 1) == []
    assert requests.num_held == 1


def test_a_pull_for_an_earlier_process_at_this_address_is_refused(requests: PrefillRequests) -> None:
    (failed,) = answers(requests.pull(A, pull(0, prefill_engine="before the restart"), 0))
    assert isinstance(failed, Failed)
    assert failed.reason is Reason.STALE_ENGINE_ID


def test_a_second_prompt_under_the_same_id_is_not_held(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    assert requests.hold(a_hold(request_id="second"), 1) == [Sent("second", Reason.REUSED_TRANSFER_ID)]
    assert requests.num_held == 1


def test_parked_transfers_are_bounded(requests: PrefillRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_connector.requests_prefill.MAX_WAITING", 10)
    for number in range(50):
        requests.pull(A, a_pull(f"p{number}", transfer_id=f"t{number}"), 0)
    assert requests.num_waiting <= 10


def test_a_release_for_another_rank_of_this_engine_ends_nothing_here(requests: PrefillRequests) -> None:
    requests.hold(a_hold(), 0)
    assert requests.release(a_release(prefill_rank=1), 1) == []
    assert requests.num_held == 1


def test_a_pull_that_comes_minutes_after_its_cancel_still_does_nothing(requests: PrefillRequests) -> None:
    requests.cancel(A, a_cancel(pull(0)), 0)
    requests.hold(a_hold(), 150)
    requests.tick(200)
    for _ in range(2):
        assert not any(isinstance(action, Write) for action in requests.pull(A, pull(0), 230))
        requests.tick(231)


@pytest.mark.parametrize("cancelled", [False, True])
def test_decode_is_told_how_long_parts_of_a_failed_batch_may_still_arrive(
    requests: PrefillRequests, cancelled: bool
) -> None:
    requests.hold(a_hold(), 0)
    requests.pull(A, pull(0), 1)
    if cancelled:
        requests.cancel(A, a_cancel(pull(0)), 2)
    broken = Written(0, PeerError(Reason.TRANSFER_ERROR, "broken"), quiet_s=30.0)
    failed = Failed("pull-0", Reason.TRANSFER_ERROR, "broken", 30.0)
    assert requests.written("transfer", "pull-0", broken, 3) == [Reply(A, failed)]


@pytest.mark.parametrize("fields", [{"prefill_rank": 1}, {"prefill_engine": "before a restart"}])
def test_a_cancel_for_another_rank_or_process_is_never_confirmed(
    requests: PrefillRequests, fields: dict[str, object]
) -> None:
    assert requests.cancel(A, a_cancel(pull(0, **fields)), 0) == []


def test_pulls_that_are_refused_again_and_again_are_remembered_up_to_a_bound(
    requests: PrefillRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_prefill, "MAX_ASKS", 3)
    requests.hold(a_hold(), 0)
    for number in range(5):
        (failed,) = answers(requests.pull(A, pull(0, pull_id=f"again {number}", digest=b"other"), 1))
        assert isinstance(failed, Failed)
    assert len(requests._transfers["transfer"].asks) == 3
