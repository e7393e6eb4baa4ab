"""What a check found, from the answer to its prompt and from the counters of both sides before and after it.

Users' requests move the same counters at the same time, so the judgement is by what can't be otherwise. Every prompt
that a decode engine takes in is counted there once, by its tokens, before its answer ends:

    tokens_received      its KV came from prefill
    tokens_recomputed    it should have, and was computed on decode

The check's prompt has n tokens that no cache holds. So with R tokens received and C tokens recomputed meanwhile, by
everybody,

    C < n             the prompt was not recomputed: its KV came from prefill
    C >= n, R < n     the prompt was recomputed
    C >= n, R >= n    others' prompts were recomputed too: not told apart; it is tried again

and an answer with C < n and R < n was computed by an engine that counts nothing: no transfer was asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dcp_operator.canary.counters import Reading, added, total
from dcp_operator.last_words import cut
from dcp_operator.reasons import Reason, Said
from dcp_operator.settings import Role

#: The connector's reasons of a prompt for which decode was not told where its KV is.
_UNASKED: Final = frozenset({"params_missing", "params_malformed"})
_INCOMPATIBLE: Final = "incompatible"
#: What to do, by the connector's reason.
_CURES: Final = {
    "bootstrap_unreachable": "see that a NetworkPolicy lets decode pods reach the prefill pods' bootstrap port",
    "bootstrap_garbage": "see that both roles have the same key, and that nothing else listens on the bootstrap port",
    "peer_lost": "see whether a prefill engine restarted, and that decode pods reach all ports of prefill pods",
    "deadline": "see that the network between the pods is up to it, or raise kvConnector.extraConfig.request_timeout_s",
    "lease_expired": "raise kvConnector.extraConfig.lease_s, or find out what keeps decode from asking in time",
    "transfer_error": "see Mooncake's messages in the prefill engine's log: devices, memory registration, protocol",
}
_DEFAULT_CURE: Final = "see the log of container main in the decode pods"


@dataclass(frozen=True, slots=True)
class Answer:
    """How the router answered. `status` is None where it gave no answer; `is_reached` tells whether it was there."""

    status: int | None
    words: str
    is_reached: bool = True


@dataclass(frozen=True, slots=True)
class Pages:
    """The counters of one role's engines, by the pods' names; None for a page without counters.

    `unread` are the engines whose page could not be had, with why.
    """

    before: Mapping[str, Reading | None]
    after: Mapping[str, Reading | None]
    unread: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a check brought together. `failures` are decode engines' own words, the newest first."""

    num_tokens: int
    answer: Answer
    pages: Mapping[Role, Pages]
    failures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found. One that is not `is_settled` may be another as soon as engines have counted the rest."""

    said: Said
    is_settled: bool = True
    #: Whether the same check may tell more when it is made once more.
    is_ambiguous: bool = False

    @property
    def is_conclusive(self) -> bool:
        """Whether it says something about the transfer, not only about the check."""
        return self.said.status != "Unknown"


def judge(evidence: Evidence) -> Verdict:
    """Return what the evidence says."""
    unread = {name: why for pages in evidence.pages.values() for name, why in pages.unread.items()}
    if unread:
        name = min(unread)
        return _unknown(
            f"the metrics of {len(unread)} engines could not be read, pod {name}: {unread[name]}. See that a "
            "NetworkPolicy lets the operator reach the engines' HTTP port"
        )
    bare = [(role, name) for role, pages in evidence.pages.items() for name, found in pages.after.items() if not found]
    if bare:
        role, name = bare[0]
        return _false(
            Reason.NO_KV_CONNECTOR,
            f"engine pod {name} ({role}) runs without the KV connector: its metrics have none of the connector's "
            "counters. What to do: remove what replaces the engine's command or arguments in the template, and check "
            "that the image runs vLLM 0.32 or newer",
        )
    changes = {role: _added(pages) for role, pages in evidence.pages.items()}
    prefill, decode = changes[Role.PREFILL], changes[Role.DECODE]
    if prefill is None or decode is None:
        return _unknown("an engine restarted while it was checked; it is tried again")
    if not evidence.answer.is_reached:
        return _unknown(
            f"the router could not be asked: {evidence.answer.words}. See that a NetworkPolicy lets the operator reach "
            "the router's HTTP port"
        )
    if evidence.answer.status == 200:
        return _judge_counters(evidence, prefill, decode)
    return _judge_refusal(evidence, prefill, decode)


def _judge_counters(evidence: Evidence, prefill: Reading, decode: Reading) -> Verdict:
    n, received, recomputed = evidence.num_tokens, decode.tokens_received, decode.total_recomputed
    if recomputed < n <= received:
        if prefill.bytes_sent > 0:
            words = f"the KV of a prompt of {n} tokens moved from prefill to decode, by the counters of both sides"
            return Verdict(Said("True", Reason.VERIFIED, words))
        # Prefill may count what it sent a moment later than decode what it received.
        words = f"decode counted {n} tokens as received, and no prefill engine counted anything as sent"
        return Verdict(Said("Unknown", Reason.NOT_CHECKED, words), is_settled=False)
    if recomputed >= n:
        failed = _failed(evidence, decode, f"the check's prompt of {n} tokens was computed again on decode")
        if received < n:
            return failed
        both = _failed(evidence, decode, f"decode computed {recomputed:.0f} prompt tokens again during the check")
        return Verdict(both.said, is_ambiguous=True)
    words = (
        f"the check's prompt of {n} tokens was answered, and no engine counted a transfer for it: decode computed it "
        "without asking prefill. What to do: see that the router hands kv_transfer_params from prefill to decode, and "
        "that the template doesn't replace --kv-transfer-config"
    )
    return Verdict(Said("False", Reason.RECOMPUTED, words), is_settled=False)


def _judge_refusal(evidence: Evidence, prefill: Reading, decode: Reading) -> Verdict:
    """Judge a prompt that got no tokens."""
    answer = evidence.answer
    if answer.status == 503:
        return _unknown(f"the router has no engines to ask: {cut(answer.words)}")
    if answer.status is not None and answer.status < 500:
        return _unknown(f"the router refused the check's prompt with HTTP {answer.status}: {cut(answer.words)}")
    if answer.status is None and (decode.tokens_received or prefill.bytes_sent):
        return _unknown(f"no answer while other requests were served: {cut(answer.words)}; it is tried again")
    what = f"HTTP {answer.status}: {cut(answer.words)}" if answer.status else cut(answer.words)
    return _failed(evidence, decode, f"the check's prompt failed ({what})")


def _failed(evidence: Evidence, decode: Reading, what: str) -> Verdict:
    """Return which failure it was, by the reasons that decode engines counted."""
    counted = decode.tokens_recomputed or decode.failed
    reasons = sorted(counted, key=lambda reason: (-counted[reason], reason))
    if reasons and set(reasons) <= _UNASKED:
        return _false(
            Reason.RECOMPUTED,
            f"{what}, because the router did not tell it where the KV is ({', '.join(reasons)}). What to do: see that "
            "requests come through the object's own router or one that passes kv_transfer_params on",
        )
    told = [(reason, detail) for reason, detail in evidence.failures if reason in reasons]
    detail = f": {cut(told[0][1])}" if told else ""
    if _INCOMPATIBLE in reasons:
        told = [each for each in told if each[0] == _INCOMPATIBLE]
        words = f"decode refused prefill's handshake{f': {told[0][1]}' if told else ''}"
        return _false(
            Reason.HANDSHAKE_REFUSED,
            f"{words}. {_upper(what)}. What to do: make the two sides alike in what is named, or see the decode "
            "engines' log for it",
        )
    if not reasons:
        return _false(
            Reason.TRANSFER_FAILED,
            f"{what}, and decode was not asked for it. What to do: see the log of container main in the prefill and "
            "router pods",
        )
    cure = _CURES.get(reasons[0], _DEFAULT_CURE)
    return _false(Reason.TRANSFER_FAILED, f"{what}, because of {', '.join(reasons)}{detail}. What to do: {cure}")


def _added(pages: Pages) -> Reading | None:
    """Return what a role's engines counted during the check; None where one of them began anew."""
    found: list[Reading] = []
    for name, after in pages.after.items():
        before = pages.before.get(name)
        change = added(before, after) if before is not None and after is not None else None
        if change is None:
            return None
        found.append(change)
    return total(found)


def _unknown(words: str) -> Verdict:
    return Verdict(Said("Unknown", Reason.NOT_CHECKED, words))


def _false(reason: Reason, words: str) -> Verdict:
    return Verdict(Said("False", reason, words))


def _upper(words: str) -> str:
    return words[:1].upper() + words[1:]
