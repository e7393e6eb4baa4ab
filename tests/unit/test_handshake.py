"""What two sides say about themselves, and the words in which they don't fit."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_connector.errors import PeerError, Reason, StartupError
from dcp_connector.handshake import (
    RankFacts,
    SideFacts,
    Topology,
    assemble,
    decode_topology,
    encode_topology,
    find_mismatches,
    pages_to_ask,
    query_answer,
)
from dcp_connector.wire import PROTOCOL_VERSION, Layout, Page

PAGE = Page(4096, 8, 16, 512, 512, 32, 32)


def side(**changes: Any) -> SideFacts:
    values: dict[str, Any] = {
        "engine_id": "engine",
        "role": "kv_producer",
        "model_hash": "hash-1",
        "model": "tiny",
        "kv_dtype": "bfloat16",
        "page_format": "rows",
        "layout": Layout(2, 2, 1, 16, 1),
        "pipeline_parallel_size": 1,
    }
    return SideFacts(**{**values, **changes})


def rank(tp: int = 0, pp: int = 0, pages: dict[str, Page] | None = None, **changes: Any) -> RankFacts:
    return RankFacts(side(**changes), tp, pp, f"tcp://10.0.0.1:{4000 + 10 * pp + tp}", pages or {"a": PAGE, "b": PAGE})


def topology(**changes: Any) -> Topology:
    return assemble("generation", [rank(0, **changes), rank(1, **changes)])


def decode_rank(**changes: Any) -> RankFacts:
    return rank(role="kv_consumer", engine_id="decode", **changes)


def test_a_topology_survives_the_round_trip() -> None:
    assert decode_topology(encode_topology(topology())) == topology()


def test_query_is_exactly_what_routers_expect() -> None:
    ranks = [rank(tp, pp, pipeline_parallel_size=2) for pp in (1, 0) for tp in (1, 0)]
    assert query_answer(assemble("g", ranks)) == {
        "0": {
            "engine_id": "engine",
            "worker_addr": {
                "0": {"0": "tcp://10.0.0.1:4000", "1": "tcp://10.0.0.1:4010"},
                "1": {"0": "tcp://10.0.0.1:4001", "1": "tcp://10.0.0.1:4011"},
            },
        }
    }


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "no worker reported"),
        ([rank(0)], r"workers \(pp, tp\) \[\(0, 0\)\] reported to the connector, expected \[\(0, 0\), \(0, 1\)\]"),
        ([rank(0), rank(0)], "reported to the connector, expected"),
        ([rank(0), rank(1, layout=Layout(2, 2, 4, 16, 1))], "start all ranks with the same flags"),
    ],
)
def test_an_engine_whose_ranks_are_missing_or_disagree_does_not_start(ranks: list[RankFacts], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        assemble("g", ranks)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", Reason.BOOTSTRAP_GARBAGE),
        (b"<html>", Reason.BOOTSTRAP_GARBAGE),
        (f'{{"protocol": {PROTOCOL_VERSION}}}'.encode(), Reason.BOOTSTRAP_GARBAGE),
        (b'{"protocol": 9, "whatever": true}', Reason.INCOMPATIBLE),
        (encode_topology(topology()).replace(b'"tp_rank":1', b'"tp_rank":0'), Reason.BOOTSTRAP_GARBAGE),
    ],
)
def test_what_is_no_topology_is_refused(body: bytes, reason: Reason) -> None:
    with pytest.raises(PeerError) as error:
        decode_topology(body)
    assert error.value.reason is reason


def test_sides_that_differ_only_in_parallelism_fit() -> None:
    assert find_mismatches(topology(), decode_rank(layout=Layout(1, 1, 32, 32, 1))) == ()


def test_sides_with_different_numbers_of_blocks_fit() -> None:
    more = {name: Page(0, 4096, 16, 512, 512, 32, 32) for name in "ab"}
    assert find_mismatches(topology(), decode_rank(pages=more)) == ()


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({"role": "kv_consumer"}, {}, "engine engine is a kv_consumer, expected a kv_producer or kv_both"),
        ({"model_hash": "hash-2"}, {}, "prefill serves tiny (hash-2), decode tiny (hash-1)"),
        ({"kv_dtype": "float16"}, {}, "KV dtype: prefill has float16, decode has bfloat16"),
        ({"layout": Layout(2, 1, 16, 16, 2)}, {}, "KV heads: prefill has 2, decode has 1"),
        ({"layout": Layout(2, 2, 3, 16, 1)}, {}, "layout of prefill: interleave 3 doesn't divide block size 16"),
        ({"pages": {"a": PAGE}}, {}, "layers: prefill has 1, decode 2; only on prefill [], only on decode ['b']"),
        (
            {"pages": {"a": PAGE, "b": Page(0, 8, 16, 1024, 1024, 64, 64)}},
            {},
            "bytes of one token and head in b: prefill has 64, decode has 32",
        ),
        ({"page_format": "opaque"}, {}, "page format: prefill has opaque, decode has rows"),
        (
            {"page_format": "opaque"},
            {"page_format": "opaque", "layout": Layout(1, 1, 16, 16, 1)},
            "so only equal layouts can exchange whole pages",
        ),
        (
            {"page_format": "opaque"},
            {"page_format": "opaque", "pages": {"a": PAGE, "b": Page(0, 8, 8, 512, 512, 32, 32)}},
            "page of b: prefill has (16, 512, 512, 32), decode has (8, 512, 512, 32)",
        ),
    ],
)
def test_a_refusal_names_both_values(prefill: dict[str, Any], decode: dict[str, Any], words: str) -> None:
    found = find_mismatches(topology(**prefill), decode_rank(**decode))
    assert any(words in problem for problem in found), found


def test_a_peer_whose_dcp_groups_would_mix_heads_is_refused() -> None:
    mixed = assemble("g", [rank(tp, layout=Layout(12, 4, 1, 16, 2)) for tp in range(12)])
    found = find_mismatches(mixed, decode_rank(layout=Layout(2, 1, 16, 16, 2)))
    assert any("layout of prefill: dcp size 4 doesn't divide the 6 ranks that hold each KV" in words for words in found)


def test_opaque_pages_of_equal_layouts_fit() -> None:
    whole: dict[str, Any] = {"page_format": "opaque", "layout": Layout(2, 1, 16, 16, 1)}
    assert find_mismatches(topology(**whole), decode_rank(**whole)) == ()


def test_opaque_pages_and_dcp_are_refused_even_between_equal_layouts() -> None:
    found = find_mismatches(topology(page_format="opaque"), decode_rank(page_format="opaque"))
    assert any("DCP size: prefill has 2, decode has 2, and whole pages need 1" in problem for problem in found), found


APART = {"a/k": Page(0, 8, 16, 512, 512, 16, 16), "a/v": Page(8192, 8, 16, 512, 512, 16, 16), "b": PAGE}


def test_keys_and_values_apart_fit_entries_that_hold_both() -> None:
    for ours, theirs in (({}, {"pages": APART}), ({"pages": APART}, {})):
        assert find_mismatches(topology(key_bytes=16, **theirs), decode_rank(key_bytes=16, **ours)) == ()
    asked = pages_to_ask(topology(pages=APART), decode_rank(key_bytes=16))
    assert asked == {"a/k": Page(4096, 8, 16, 512, 512, 32, 16), "a/v": Page(4112, 8, 16, 512, 512, 32, 16), "b": PAGE}


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({"pages": APART}, {}, "only on prefill [], only on decode ['a']"),
        ({}, {"pages": APART}, "only on prefill [], only on decode ['a/k', 'a/v']"),
        ({"pages": APART, "key_bytes": 8}, {"key_bytes": 8}, "bytes of one token and head in a/k: prefill has 16"),
    ],
)
def test_keys_and_values_that_cannot_be_told_apart_do_not_fit(
    prefill: dict[str, Any], decode: dict[str, Any], words: str
) -> None:
    found = find_mismatches(topology(**prefill), decode_rank(**decode))
    assert any(words in problem for problem in found), found


def test_a_pipeline_stage_of_decode_needs_its_own_layers_only() -> None:
    stage = decode_rank(pages={"b": PAGE}, pipeline_parallel_size=2)
    assert find_mismatches(topology(), stage) == ()
    unknown = decode_rank(pages={"c": PAGE}, pipeline_parallel_size=2)
    assert any("only on decode ['c']" in problem for problem in find_mismatches(topology(), unknown))
    alone = decode_rank(pages={"b": PAGE})
    assert any("only on prefill ['a']" in problem for problem in find_mismatches(topology(), alone))


def test_query_names_the_data_parallel_rank_of_the_engine_id() -> None:
    assert set(query_answer(topology(engine_id="engine_dp3"))) == {"3"}


def test_layers_of_all_pipeline_stages_count() -> None:
    stages = [rank(tp, pp, {"ab"[pp]: PAGE}, pipeline_parallel_size=2) for pp in (0, 1) for tp in (0, 1)]
    assert find_mismatches(assemble("g", stages), decode_rank()) == ()
