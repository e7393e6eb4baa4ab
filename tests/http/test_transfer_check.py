"""A check of the KV transfer over real HTTP: against stand-in engines behind a serial router, each verdict."""

import asyncio
import itertools
import socket
import time
from contextlib import closing
from typing import Any

import pytest

from dcp_operator.canary.request import MARK, Engine, Request
from dcp_operator.canary_http import HttpProbe, Outcome
from dcp_operator.reasons import Reason
from dcp_operator.settings import Role
from tests.support.canary_line import NUM_TOKENS, Line, line
from tests.support.redirects import redirecting

NONCES = map(str, itertools.count(1))


def check(request: Request, *, answer_s: float = 10.0, settle_s: float = 0.4) -> Outcome:
    probe = HttpProbe(lambda: next(NONCES), answer_s=answer_s, settle_s=settle_s)
    return asyncio.run(probe.check(request))


def test_kv_that_moves_is_verified_by_a_small_prompt_of_its_own_length_and_salt():
    with line() as found:
        outcome = check(found.request())
        assert outcome.verdict.said.reason is Reason.VERIFIED
        assert outcome.num_prompts == 1
        check(found.request())
        first, second = found.bodies
        assert len(first["prompt"]) == NUM_TOKENS
        assert all(isinstance(token, int) and 0 < token < 100 for token in first["prompt"])
        assert first["max_tokens"] == 2
        assert first["user"] == MARK
        assert first["cache_salt"].startswith(f"{MARK}-")
        assert first["cache_salt"] != second["cache_salt"]
        assert first["prompt"] != second["prompt"]


#: name -> (prefill told, decode told, policy, reason, words)
VERDICTS: dict[str, tuple[dict[str, Any], dict[str, Any], str, Reason, str]] = {
    "prefill hands over no parameters": ({"transfer": "none"}, {}, "recompute", Reason.RECOMPUTED, "params_missing"),
    "decode ignores the parameters": ({}, {"transfer": "none"}, "recompute", Reason.RECOMPUTED, "no engine counted"),
    "the KV does not come in time": (
        {},
        {"transfer": "recompute"},
        "recompute",
        Reason.TRANSFER_FAILED,
        "because of deadline: the stand-in's pull ended",
    ),
    "the KV does not come, and requests fail by policy": (
        {},
        {"transfer": "recompute"},
        "fail",
        Reason.TRANSFER_FAILED,
        "HTTP 500",
    ),
    "the handshake is refused": (
        {},
        {"refuse": "block size: prefill has 32, decode has 64"},
        "recompute",
        Reason.HANDSHAKE_REFUSED,
        "block size: prefill has 32, decode has 64",
    ),
    "prefill answers 500": ({"completions": "error"}, {}, "recompute", Reason.TRANSFER_FAILED, "returned 500"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_each_way_of_not_moving_kv_has_its_verdict(case: str):
    prefill, decode, policy, reason, words = VERDICTS[case]
    with line(prefill, decode, policy) as found:
        said = check(found.request()).verdict.said
    assert (said.status, said.reason) == ("False", reason), said.message
    assert words in said.message


def test_a_prefill_engine_that_never_answers_ends_the_check_in_its_time():
    with line({"completions": "hang"}) as found:
        began = time.monotonic()
        said = check(found.request(), answer_s=0.5).verdict.said
        assert time.monotonic() - began < 10
    assert (said.status, said.reason) == ("False", Reason.TRANSFER_FAILED)
    assert "no answer within" in said.message


def test_traffic_of_others_changes_no_verdict_that_is_sure():
    with line() as found:
        found.others = [True, True]
        assert check(found.request()).verdict.said.reason is Reason.VERIFIED
    with line(decode={"transfer": "recompute"}) as found:
        found.others = [False]
        said = check(found.request()).verdict.said
        assert said.status == "False"


def test_where_others_were_recomputed_meanwhile_the_check_is_made_again_and_then_says_so():
    with line() as found:
        found.others = [False]
        outcome = check(found.request())
        assert outcome.num_prompts == 3
        assert outcome.verdict.said.status == "False"
        assert "decode computed" in outcome.verdict.said.message
        found.others = []
        assert check(found.request()).verdict.said.reason is Reason.VERIFIED


def a_closed_port() -> str:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def unreadable(found: Line) -> Request:
    return found.request(engines=(*found.request().engines, Engine("gone", Role.DECODE, f"{a_closed_port()}/m", None)))


#: name -> the check of a pair that works, what the router answers instead, words
UNCHECKED: dict[str, tuple[Any, list[tuple[int, str]], str]] = {
    "nothing listens at the router's address": (lambda found: found.request(router_url=a_closed_port()), [], "router"),
    "an engine's metrics can't be read": (unreadable, [], "pod gone"),
    "the router has no engines": (Line.request, [(503, "No available workers: 0 prefill, 1 decode")], "0 prefill"),
    "the engines want a key": (Line.request, [(401, "Unauthorized")], "HTTP 401"),
}


@pytest.mark.parametrize("case", UNCHECKED)
def test_what_keeps_the_check_from_being_made_is_no_failure_of_the_transfer(case: str):
    make, answers, words = UNCHECKED[case]
    with line() as found:
        found.answers = list(answers)
        outcome = check(make(found))
    said = outcome.verdict.said
    assert (said.status, said.reason) == ("Unknown", Reason.NOT_CHECKED), said.message
    assert words in said.message
    assert outcome.num_prompts == len(answers), "what never left is not counted as sent"


def test_engines_without_the_connectors_counters_have_no_connector():
    with line() as found:
        request = found.request()
        bare = Engine("d", Role.DECODE, f"{found.urls['decode']}/health", None)
        said = check(found.request(engines=(request.engines[0], bare))).verdict.said
    assert (said.status, said.reason) == ("False", Reason.NO_KV_CONNECTOR)
    assert "pod d (decode)" in said.message


def test_a_router_that_redirects_refused_the_prompt_and_nobody_else_gets_it():
    with line() as found, redirecting() as (url, elsewhere):
        said = check(found.request(router_url=url)).verdict.said
        assert (said.status, said.reason) == ("Unknown", Reason.NOT_CHECKED)
        assert "refused the check's prompt with HTTP 307: it redirects to http://127.0.0.1:" in said.message
        assert "/elsewhere, where the operator doesn't follow" in said.message
        assert elsewhere == []


def test_an_engine_whose_metrics_redirect_has_none_and_nobody_else_is_asked():
    with line() as found, redirecting() as (url, elsewhere):
        astray = Engine("d", Role.DECODE, f"{url}/metrics", None)
        said = check(found.request(engines=(found.request().engines[0], astray))).verdict.said
        assert (said.status, said.reason) == ("Unknown", Reason.NOT_CHECKED)
        assert f"pod d: {url}/metrics answers 307: it redirects to http://127.0.0.1:" in said.message
        assert elsewhere == []
