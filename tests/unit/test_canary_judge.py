"""What a check of the KV transfer concludes: every verdict, and that traffic of others never changes a sure one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_operator.canary.counters import Reading, added, read_page, total
from dcp_operator.canary.judge import Answer, Evidence, Pages, judge
from dcp_operator.reasons import Reason
from dcp_operator.settings import Role

N = 65
OK = Answer(200, "{}")
ZERO = Reading()


def evidence(
    decode: Reading | None = ZERO,
    prefill: Reading | None = ZERO,
    answer: Answer = OK,
    failures: tuple[tuple[str, str], ...] = (),
    unread: dict[str, str] | None = None,
) -> Evidence:
    """What was counted since the check began, by one engine of each role."""
    return Evidence(
        N,
        answer,
        {
            Role.PREFILL: Pages({"p": ZERO}, {"p": prefill}, {}),
            Role.DECODE: Pages({"d": ZERO}, {"d": decode}, unread or {}),
        },
        failures,
    )


RECEIVED = Reading(tokens_received=N)
SENT = Reading(bytes_sent=1000.0)


def recomputed(reason: str, tokens: float = N, received: float = 0.0) -> Reading:
    return Reading(tokens_received=received, tokens_recomputed={reason: tokens}, failed={reason: 1.0})


DOES_NOT_FIT = "prefill engine e at http://10.0.0.7:8998 doesn't fit: KV dtype: prefill has fp8, decode has bfloat16"

#: name -> (evidence, status, reason, what the message must say)
CASES = {
    "KV moved": (evidence(RECEIVED, SENT), "True", Reason.VERIFIED, ["65 tokens moved"]),
    "KV moved while others' prompts moved too": (
        evidence(Reading(tokens_received=N + 900), SENT),
        "True",
        Reason.VERIFIED,
        ["65 tokens moved"],
    ),
    "KV moved while a shorter prompt of others was recomputed": (
        evidence(recomputed("deadline", N - 1, received=N), SENT),
        "True",
        Reason.VERIFIED,
        [],
    ),
    "decode says received, prefill says nothing": (
        evidence(RECEIVED),
        "Unknown",
        Reason.NOT_CHECKED,
        ["no prefill engine"],
    ),
    "the router gave decode no parameters": (
        evidence(recomputed("params_missing"), SENT),
        "False",
        Reason.RECOMPUTED,
        ["65 tokens was computed again on decode", "params_missing", "kv_transfer_params"],
    ),
    "decode ignores the parameters": (
        evidence(ZERO, SENT),
        "False",
        Reason.RECOMPUTED,
        ["no engine counted a transfer", "--kv-transfer-config"],
    ),
    "the KV did not come in time": (
        evidence(recomputed("deadline"), failures=(("deadline", "no answer of tcp://10.0.0.7:4711"),)),
        "False",
        Reason.TRANSFER_FAILED,
        ["because of deadline: no answer of tcp://10.0.0.7:4711. What to do: see that the network"],
    ),
    "a failure of an unknown name": (
        evidence(recomputed("moon_phase")),
        "False",
        Reason.TRANSFER_FAILED,
        ["because of moon_phase. What to do: see the log"],
    ),
    "a handshake was refused, with decode's words": (
        evidence(recomputed("incompatible"), failures=(("deadline", "old"), ("incompatible", DOES_NOT_FIT))),
        "False",
        Reason.HANDSHAKE_REFUSED,
        ["prefill has fp8, decode has bfloat16", "http://10.0.0.7:8998"],
    ),
    "a handshake was refused, and nobody tells why": (
        evidence(recomputed("incompatible")),
        "False",
        Reason.HANDSHAKE_REFUSED,
        ["decode refused prefill's handshake. The check's prompt"],
    ),
    "a handshake was refused, and requests fail by policy": (
        evidence(Reading(failed={"incompatible": 1.0}), answer=Answer(500, "KV load failed")),
        "False",
        Reason.HANDSHAKE_REFUSED,
        ["HTTP 500: KV load failed"],
    ),
    "prefill answers 500": (
        evidence(answer=Answer(500, "Prefill server http://10.0.0.7:8000 returned 500")),
        "False",
        Reason.TRANSFER_FAILED,
        ["returned 500", "decode was not asked"],
    ),
    "no answer comes": (
        evidence(answer=Answer(None, "no answer within 60 s")),
        "False",
        Reason.TRANSFER_FAILED,
        ["no answer within 60 s"],
    ),
    "no answer comes, and others are served": (
        evidence(Reading(tokens_received=9.0), answer=Answer(None, "no answer within 60 s")),
        "Unknown",
        Reason.NOT_CHECKED,
        ["while other requests were served"],
    ),
    "the router has no engines": (
        evidence(answer=Answer(503, "No available workers: 0 prefill, 1 decode")),
        "Unknown",
        Reason.NOT_CHECKED,
        ["0 prefill"],
    ),
    "the engines want a key": (
        evidence(answer=Answer(401, '{"error":"Unauthorized"}')),
        "Unknown",
        Reason.NOT_CHECKED,
        ["HTTP 401", "Unauthorized"],
    ),
    "the router can't be reached": (
        evidence(answer=Answer(None, "Cannot connect to host 10.0.0.9:8080", is_reached=False)),
        "Unknown",
        Reason.NOT_CHECKED,
        ["NetworkPolicy", "10.0.0.9:8080"],
    ),
    "an engine's metrics can't be read": (
        evidence(unread={"d": "http://10.0.0.8:8000/metrics does not answer"}),
        "Unknown",
        Reason.NOT_CHECKED,
        ["pod d: http://10.0.0.8:8000/metrics does not answer", "NetworkPolicy"],
    ),
    "decode runs without the connector": (evidence(None, SENT), "False", Reason.NO_KV_CONNECTOR, ["pod d (decode)"]),
    "prefill runs without the connector": (evidence(RECEIVED, None), "False", Reason.NO_KV_CONNECTOR, ["p (prefill)"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_is_what_the_evidence_says(case: str):
    given_evidence, status, reason, words = CASES[case]
    said = judge(given_evidence).said
    assert (said.status, said.reason) == (status, reason), said.message
    for expected in words:
        assert expected in said.message
    if status == "False":
        assert "What to do: " in said.message


def test_an_engine_that_began_anew_during_the_check_spoils_it():
    found = evidence(Reading(tokens_received=5.0), SENT)
    before = {"d": Reading(tokens_received=900.0)}
    spoiled = replace(found, pages={**found.pages, Role.DECODE: replace(found.pages[Role.DECODE], before=before)})
    assert judge(spoiled).said.reason is Reason.NOT_CHECKED
    assert "restarted" in judge(spoiled).said.message


def test_only_a_check_that_others_may_have_decided_is_ambiguous():
    found = judge(evidence(recomputed("deadline", N, received=N), SENT))
    assert found.is_ambiguous
    assert (found.said.status, found.said.reason) == ("False", Reason.TRANSFER_FAILED)
    assert not any(judge(given_evidence).is_ambiguous for given_evidence, *_ in CASES.values())


@given(
    moved=st.booleans(),
    others=st.lists(st.tuples(st.booleans(), st.integers(1, 3 * N)), max_size=6),
    engines=st.integers(1, 3),
    data=st.data(),
)
def test_a_sure_verdict_is_right_whatever_others_do(
    moved: bool, others: list[tuple[bool, int]], engines: int, data: st.DataObject
):
    """Whether the check's prompt moved is known here; the judge sees sums over everybody's prompts."""
    counted = {f"d{number}": Reading() for number in range(engines)}
    for is_received, tokens in [(moved, N), *others]:
        name = data.draw(st.sampled_from(sorted(counted)))
        prompt = Reading(tokens_received=tokens) if is_received else recomputed("deadline", tokens)
        counted[name] = total([counted[name], prompt])
    pages = Pages(dict.fromkeys(counted, ZERO), dict(counted), {})
    verdict = judge(Evidence(N, OK, {Role.PREFILL: Pages({"p": ZERO}, {"p": SENT}, {}), Role.DECODE: pages}))
    unlike_it = sum(tokens for is_received, tokens in others if is_received != moved)
    assert verdict.is_ambiguous is (unlike_it >= N)
    if not verdict.is_ambiguous:
        assert (verdict.said.reason is Reason.VERIFIED) is moved


PAGE = """\
# HELP vllm:dcp_kv_tokens_received_total Prompt tokens
# TYPE vllm:dcp_kv_tokens_received_total counter
vllm:dcp_kv_tokens_received_total{engine="0",model_name="chat"} 1200.0
vllm:dcp_kv_tokens_received_total{engine="1",model_name="chat"} 3.4e3
vllm:dcp_kv_tokens_received_created{engine="0",model_name="chat"} 1.7e9
vllm:dcp_kv_tokens_recomputed_total{engine="0",model_name="chat",reason="deadline"} 7.0
vllm:dcp_kv_tokens_recomputed_total{engine="0",model_name="a reason=\\"x\\"",reason="params_missing"} 0.0
vllm:dcp_kv_failed_transfers_total{engine="0",reason="deadline"} 2.0
vllm:dcp_kv_bytes_sent_total 5
vllm:dcp_kv_pinned_requests{engine="0"} 1.0
vllm:prompt_tokens_total{engine="0"} 99.0
"""


def test_counters_are_read_off_a_page_and_summed_over_ranks():
    assert read_page(PAGE) == Reading(4600.0, {"deadline": 7.0, "params_missing": 0.0}, {"deadline": 2.0}, 5.0)


@pytest.mark.parametrize("page", ["", "vllm:prompt_tokens_total 9\n", "vllm:dcp_kv_bytes_sent_total nan\n", "\x00{{{"])
def test_a_page_without_the_connectors_counters_is_none(page: str):
    assert read_page(page) is None


def test_what_was_added_is_none_when_a_counter_went_back():
    before = Reading(10.0, {"deadline": 1.0}, {}, 5.0)
    assert added(before, Reading(12.0, {"deadline": 4.0}, {"deadline": 1.0}, 5.0)) == Reading(
        2.0, {"deadline": 3.0}, {"deadline": 1.0}, 0.0
    )
    assert added(before, Reading(9.0, {"deadline": 1.0}, {}, 5.0)) is None
    assert added(before, Reading(10.0, {}, {}, 5.0)) is None
