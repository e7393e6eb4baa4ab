"""The scheduler's instance: which requests take part, and what the workers are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dcp_connector.errors import Reason
from dcp_connector.requests_decode import Load
from dcp_connector.scheduler import Identity, SchedulerSide
from dcp_connector.stats import Counters
from dcp_connector.wire import token_digest
from dcp_connector.work import RankReport

VIRTUAL_BLOCK = 64
ORIGIN = "http://10.0.0.1:8998"
HAND_OFF = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer"}
FETCH = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_bootstrap_addr": "http://10.0.0.2:8998",
    "remote_engine_id": "prefill",
    "transfer_id": "xfer",
}


@dataclass
class FakeRequest:
    kv_transfer_params: Any = None
    num_prompt_tokens: int = 100
    num_computed_tokens: int = 100
    request_id: str = "request"
    lora_request: Any = None
    prompt_token_ids: Any = field(default=None)

    def __post_init__(self) -> None:
        if self.prompt_token_ids is None:
            self.prompt_token_ids = list(range(self.num_prompt_tokens))


class Side:
    def __init__(self, *, producer: bool, consumer: bool, recomputes: bool = True) -> None:
        self.counters = Counters()
        self.now = 0.0
        me = Identity("me", ORIGIN, producer, consumer, VIRTUAL_BLOCK, recomputes)
        self.side = SchedulerSide(me, self.counters, lambda: "minted", 100.0, lambda: self.now)


@pytest.fixture
def prefill() -> Side:
    return Side(producer=True, consumer=False)


@pytest.fixture
def decode() -> Side:
    return Side(producer=False, consumer=True)


def finish(side: Side, request: FakeRequest, blocks: int = 10, *, handed_off: bool = True) -> tuple[bool, Any]:
    return side.side.finished(request, list(range(blocks)), handed_off=handed_off)


def tokens(count: int) -> bytes:
    return np.arange(count, dtype="<i4").tobytes()


def test_a_finished_prompt_is_held_and_answered_with_all_that_decode_needs(prefill: Side) -> None:
    assert finish(prefill, FakeRequest(HAND_OFF)) == (
        True,
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": "xfer",
            "remote_bootstrap_addr": ORIGIN,
            "remote_engine_id": "me",
            "remote_num_tokens": 100,
        },
    )
    (hold,) = prefill.side.take_work().holds
    assert (hold.request_id, hold.transfer_id, hold.num_tokens, hold.tokens) == ("request", "xfer", 100, tokens(100))
    assert prefill.side.take_work().is_empty()
    assert prefill.counters.take() == {"pinned_requests": 1, "pinned_blocks": 10}


def test_pinned_requests_and_blocks_are_counted_down_to_zero(prefill: Side) -> None:
    for number, blocks in ((1, 3), (2, 5)):
        finish(prefill, FakeRequest({**HAND_OFF, "transfer_id": f"xfer-{number}"}, request_id=f"r{number}"), blocks)
    assert prefill.counters.take() == {"pinned_requests": 2, "pinned_blocks": 8}
    prefill.side.settle(RankReport(sent={"r1": None}), ["r1"], [])
    assert prefill.counters.take() == {"transfers": {"sent": 1}, "pinned_requests": 1, "pinned_blocks": 5}
    prefill.side.settle(RankReport(sent={"r2": None}), ["r2", "never held"], [])
    assert prefill.counters.take() == {"transfers": {"sent": 2}, "pinned_requests": 0, "pinned_blocks": 0}


@pytest.mark.parametrize(("num_tokens", "blocks"), [(63, 1), (64, 1), (65, 2), (100, 2), (128, 2)])
def test_look_ahead_blocks_beyond_the_prompt_are_cut_off(prefill: Side, num_tokens: int, blocks: int) -> None:
    finish(prefill, FakeRequest(HAND_OFF, num_tokens, num_tokens))
    assert prefill.side.take_work().holds[0].block_ids == tuple(range(blocks))


def test_a_transfer_id_is_minted_when_the_router_sends_none(prefill: Side) -> None:
    _, params = finish(prefill, FakeRequest({**HAND_OFF, "transfer_id": None}))
    assert params["transfer_id"] == prefill.side.take_work().holds[0].transfer_id == "minted"


@pytest.mark.parametrize(
    ("request_", "handed_off"),
    [(FakeRequest(HAND_OFF), False), (FakeRequest(HAND_OFF, num_computed_tokens=99), True)],
    ids=["aborted", "not computed to the end"],
)
def test_a_prompt_that_did_not_complete_is_told_to_whoever_waits(
    prefill: Side, request_: FakeRequest, handed_off: bool
) -> None:
    assert finish(prefill, request_, handed_off=handed_off) == (False, None)
    work = prefill.side.take_work()
    assert work.holds == []
    assert work.drops == [("xfer", Reason.PREFILL_ABORTED)]


def test_a_transfer_id_that_is_used_twice_is_held_once(prefill: Side) -> None:
    finish(prefill, FakeRequest(HAND_OFF))
    assert finish(prefill, FakeRequest(HAND_OFF, request_id="second")) == (False, None)
    assert len(prefill.side.take_work().holds) == 1
    assert prefill.counters.take()["failed"] == {"reused_transfer_id": 1}
    prefill.now = 101
    assert finish(prefill, FakeRequest(HAND_OFF, request_id="much later"))[0]


def test_a_plain_request_is_left_alone(prefill: Side) -> None:
    assert finish(prefill, FakeRequest()) == (False, None)
    assert prefill.side.take_work().is_empty()


@pytest.mark.parametrize(
    ("computed", "expected"),
    [(0, (100, True)), (64, (36, True)), (98, (2, True)), (99, (0, False)), (100, (0, False))],
)
def test_all_that_is_missing_is_fetched_unless_it_is_only_the_last_token(
    decode: Side, computed: int, expected: tuple[int, bool]
) -> None:
    request = FakeRequest(FETCH)
    for _ in range(3):
        assert decode.side.matched_tokens(request, computed) == expected
    assert decode.side.take_work().is_empty()


def test_no_more_is_fetched_than_prefill_says_that_it_has(decode: Side) -> None:
    request = FakeRequest({**FETCH, "remote_num_tokens": 90})
    assert decode.side.matched_tokens(request, 64) == (26, True)
    decode.side.allocated(request, [7, 8, 9], 26)
    (load,) = decode.side.take_work().loads
    assert (load.start, load.end, load.block_ids) == (64, 90, (7, 8))


def test_allocated_blocks_are_loaded_once(decode: Side) -> None:
    request = FakeRequest(FETCH)
    decode.side.allocated(request, [7, 8, 9], 36)
    decode.side.allocated(request, [7, 8, 9], 0)
    assert decode.side.take_work().loads == [
        Load("request", "xfer", "http://10.0.0.2:8998", "prefill", (7, 8), 64, 100, token_digest(tokens(100), ""))
    ]
    assert decode.side.matched_tokens(request, 0) == (0, False)


def test_a_local_hit_of_all_that_matters_releases_prefill(decode: Side) -> None:
    decode.side.allocated(FakeRequest(FETCH), [7, 8], 0)
    assert decode.side.take_work().releases == [("xfer", "http://10.0.0.2:8998", "prefill")]
    finish(decode, FakeRequest(FETCH))
    assert decode.side.take_work().is_empty()


def test_a_request_that_was_refused_before_it_got_blocks_releases_prefill(decode: Side) -> None:
    decode.side.on_new_request(FakeRequest(FETCH))
    assert finish(decode, FakeRequest(FETCH), handed_off=False) == (False, None)
    assert decode.side.take_work().releases == [("xfer", "http://10.0.0.2:8998", "prefill")]


def test_a_request_that_ends_while_it_is_loading_is_aborted_on_the_workers(decode: Side) -> None:
    decode.side.allocated(FakeRequest(FETCH), [7, 8], 100)
    assert finish(decode, FakeRequest(FETCH), handed_off=False) == (False, None)
    assert decode.side.take_work().aborts == ["request"]


def test_a_request_that_ends_after_loading_tells_nobody(decode: Side) -> None:
    decode.side.allocated(FakeRequest(FETCH), [7, 8], 100)
    decode.side.take_work()
    decode.side.settle(RankReport(received={"request": None}), [], ["request"])
    finish(decode, FakeRequest(FETCH))
    assert decode.side.take_work().is_empty()


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([None, None], {"tokens_received": 36, "transfers": {"received": 1}, "receive_seconds": [2.5]}),
        (
            [None, Reason.PEER_LOST],
            {"transfers": {"failed": 1}, "failed": {"peer_lost": 1}, "tokens_recomputed": {"peer_lost": 36}},
        ),
        (
            [Reason.DEADLINE, None],
            {"transfers": {"expired": 1}, "failed": {"deadline": 1}, "tokens_recomputed": {"deadline": 36}},
        ),
        ([Reason.CANCELLED, Reason.CANCELLED], {"transfers": {"aborted": 1}}),
    ],
)
def test_a_load_is_counted_once_whatever_the_number_of_ranks(
    decode: Side, reports: list[Reason | None], expected: dict[str, Any]
) -> None:
    decode.side.allocated(FakeRequest(FETCH), [7, 8], 36)
    decode.now = 2.5
    for reason in reports:
        decode.side.settle(RankReport(received={"request": reason}), [], [])
    decode.side.settle(None, [], ["request"])
    assert decode.counters.take() == expected


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([None, Reason.RELEASED], {"transfers": {"sent": 1}}),
        ([Reason.RELEASED, Reason.RELEASED], {"transfers": {"released": 1}}),
        ([None, Reason.LEASE_EXPIRED], {"transfers": {"expired": 1}, "failed": {"lease_expired": 1}}),
        ([None, Reason.TRANSFER_ERROR], {"transfers": {"failed": 1}, "failed": {"transfer_error": 1}}),
    ],
)
def test_a_rank_that_served_nobody_does_not_make_a_hand_off_a_failure(
    prefill: Side, reports: list[Reason | None], expected: dict[str, Any]
) -> None:
    finish(prefill, FakeRequest(HAND_OFF))
    prefill.counters.take()
    for reason in reports:
        prefill.side.settle(RankReport(sent={"request": reason}), [], [])
    prefill.side.settle(None, ["request"], [])
    assert prefill.counters.take() == {**expected, "pinned_requests": 0, "pinned_blocks": 0}


@pytest.mark.parametrize("params", ["text", {"do_remote_prefill": 1}, {**FETCH, "transfer_id": 3}, HAND_OFF])
def test_nonsense_on_decode_is_counted_and_computed_locally(decode: Side, params: Any) -> None:
    request = FakeRequest(params)
    decode.side.on_new_request(request)
    assert decode.side.matched_tokens(request, 0) == (0, False)
    decode.side.allocated(request, [1, 2], 0)
    assert finish(decode, request) == (False, None)
    assert decode.side.take_work().is_empty()
    assert decode.counters.take() == {"failed": {"params_malformed": 1}, "tokens_recomputed": {"params_malformed": 100}}


def test_missing_parameters_on_decode_are_counted_with_the_tokens_that_it_computes_itself(decode: Side) -> None:
    request = FakeRequest()
    decode.side.on_new_request(request)
    assert decode.counters.take() == {"failed": {"params_missing": 1}}
    decode.side.matched_tokens(request, 64)
    for _ in range(3):
        decode.side.allocated(request, [1, 2], 0)
    assert decode.counters.take() == {"tokens_recomputed": {"params_missing": 36}}


def test_a_request_that_ends_with_an_error_recomputes_nothing() -> None:
    decode = Side(producer=False, consumer=True, recomputes=False)
    decode.side.allocated(FakeRequest(FETCH), [7, 8], 36)
    decode.side.settle(RankReport(received={"request": Reason.DEADLINE}), [], ["request"])
    assert decode.counters.take() == {"transfers": {"expired": 1}, "failed": {"deadline": 1}}


def test_an_engine_of_both_roles_may_be_asked_plainly() -> None:
    both = Side(producer=True, consumer=True)
    both.side.on_new_request(FakeRequest())
    both.side.allocated(FakeRequest(), [1], 0)
    assert both.counters.take() is None


def test_nonsense_on_prefill_is_counted_and_recomputes_nothing(prefill: Side) -> None:
    request = FakeRequest({"do_remote_decode": "yes"})
    prefill.side.on_new_request(request)
    prefill.side.allocated(request, [1], 0)
    assert prefill.counters.take() == {"failed": {"params_malformed": 1}}


def test_a_prompt_of_embeddings_has_no_tokens_to_compare(prefill: Side) -> None:
    request = FakeRequest(HAND_OFF)
    request.prompt_token_ids = None
    finish(prefill, request)
    assert prefill.side.take_work().holds[0].tokens == b""


def test_the_time_of_a_step_counts_from_its_begin_and_idle_engines_have_none(prefill: Side) -> None:
    prefill.now = 5.0
    assert prefill.side.stalled_s == 0.0
    prefill.side.step_begins(0)
    prefill.now = 500.0
    assert prefill.side.stalled_s == 0.0, "a step without tokens waits for nothing"
    prefill.side.step_begins(3)
    prefill.now = 507.0
    prefill.side.step_begins(3)  # the next one is queued behind it
    assert prefill.side.stalled_s == 7.0
    prefill.side.step_ended()
    prefill.now = 1000.0
    assert prefill.side.stalled_s == 0.0


class Pool:
    """Counts references to blocks as vLLM's pool does; the request holds one."""

    def __init__(self) -> None:
        self.blocks = list(range(64))
        self.references = [1] * 64

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            self.references[block] -= 1


def loading(decode: Side) -> FakeRequest:
    """A request whose tokens 64 to 100 are being fetched into block 9 on two ranks; block 7 is a local prefix."""
    request = FakeRequest(FETCH)
    decode.side.allocated(request, [7, 9], 36)
    decode.side.take_work()
    return request


def test_one_rank_that_failed_stops_the_others(decode: Side) -> None:
    loading(decode)
    decode.side.settle(RankReport(received={"request": Reason.TRANSFER_ERROR}), (), ())
    assert decode.side.has_work(), "the engine has to step, so that the workers hear it"
    assert decode.side.take_work().aborts == ["request"]
    decode.side.settle(RankReport(received={"request": Reason.CANCELLED}), (), ["request"])
    assert decode.counters.take()["failed"] == {"transfer_error": 1}
    assert not decode.side.has_work()


def test_a_rank_that_is_done_stops_nobody(decode: Side) -> None:
    loading(decode)
    decode.side.settle(RankReport(received={"request": None}), (), ())
    assert decode.side.take_work().is_empty()


def test_blocks_that_may_still_be_written_to_are_kept_until_all_ranks_cleared_them(decode: Side) -> None:
    pool = Pool()
    decode.side.bind_blocks(pool)
    loading(decode)
    unclear = RankReport(received={"request": Reason.DEADLINE}, unclear={"request": 2})
    decode.side.settle(unclear, (), ["request"])
    assert (pool.references[7], pool.references[9]) == (1, 2), "only what was fetched is kept, the prefix is shared"
    decode.side.settle(RankReport(cleared={"request": 1}), (), ())
    assert pool.references[9] == 2
    decode.side.settle(RankReport(cleared={"request": 1}), (), ())
    assert pool.references[9] == 1


def test_reports_of_two_ranks_add_up() -> None:
    first = RankReport(received={"a": Reason.CANCELLED, "b": None}, unclear={"a": 1})
    second = RankReport(received={"a": Reason.DEADLINE}, unclear={"a": 1}, cleared={"c": 1})
    assert first.merged(second) == RankReport(
        received={"a": Reason.DEADLINE, "b": None}, unclear={"a": 2}, cleared={"c": 1}
    )


class Blocks:
    """vLLM's pool of blocks, as far as a gauge needs it."""

    blocks = tuple(range(20))

    def touch(self, blocks: Any) -> None:
        pass

    def free_blocks(self, ordered_blocks: Any) -> None:
        pass


def test_blocks_that_a_writer_may_still_write_into_are_counted_down_to_zero(decode: Side) -> None:
    decode.side.bind_blocks(Blocks())
    decode.side.allocated(FakeRequest(FETCH), [7, 8], 100)
    report = RankReport(received={"request": Reason.DEADLINE}, unclear={"request": 1})
    decode.side.settle(report, [], ["request"])
    assert (decode.counters.take() or {})["quarantined_blocks"] == 2
    decode.side.settle(RankReport(cleared={"request": 1}), [], [])
    assert decode.counters.take() == {"quarantined_blocks": 0}
