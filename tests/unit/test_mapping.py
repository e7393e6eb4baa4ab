"""Mapping: pairing of ranks and runs, by table. The mathematics is in tests/property/test_mapping_properties.py."""

from collections import Counter

import numpy as np
import pytest

from dcp_connector.geometry import GeometryError
from dcp_connector.mapping import (
    Source,
    check_pair,
    destinations,
    mean_run,
    period,
    plan_runs,
    shares_tokens,
    sources,
)
from tests.support.kv_oracle import Sizes


def _plan(prefill, decode, prefill_shard, decode_shard, start, end):
    return plan_runs(Sizes(*prefill).layout(), Sizes(*decode).layout(), prefill_shard, decode_shard, start, end)


def _rows(runs):
    columns = (runs.src_block, runs.src_row, runs.dst_block, runs.dst_row, runs.num_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize(
    ("prefill", "decode", "tokens"),
    [
        # (W, I, B) of both sides and the mean run in tokens over 4,096 tokens.
        ((1, 1, 16), (1, 1, 16), 16),
        ((1, 1, 16), (2, 16, 16), 16),
        ((1, 1, 16), (2, 8, 16), 8),
        ((1, 1, 16), (2, 1, 16), 1),
        ((1, 1, 128), (2, 1, 128), 1),
        ((2, 1, 16), (2, 1, 16), 16),
        ((2, 1, 32), (2, 1, 16), 16),
        ((2, 1, 16), (4, 1, 16), 1),
        ((2, 4, 16), (4, 2, 16), 2),
        ((2, 16, 16), (8, 4, 16), 4),
        ((8, 16, 16), (1, 1, 16), 16),
        ((8, 1, 16), (1, 1, 16), 1),
        ((1, 1, 128), (4, 64, 64), 64),
    ],
)
def test_the_mean_run_is_as_long_as_the_layouts_allow(prefill, decode, tokens):
    (wp, ip, bp), (wd, id_, bd) = prefill, decode
    assert mean_run(_plan((wp, wp, ip, bp, 1), (wd, wd, id_, bd, 1), 0, 0, 0, 4096)) == tokens


@pytest.mark.parametrize(
    ("prefill", "decode", "shards", "span", "expected"),
    [
        pytest.param(
            (1, 1, 1, 4, 1),
            (2, 2, 2, 4, 1),
            (0, 1),
            (0, 11),
            [(0, 2, 0, 0, 2), (1, 2, 0, 2, 2), (2, 2, 1, 0, 1)],
            id="stripes of two to the second shard",
        ),
        pytest.param(
            (1, 1, 1, 4, 1),
            (2, 2, 2, 4, 1),
            (0, 1),
            (8, 11),
            [(2, 2, 1, 0, 1)],
            id="a prefix hit leaves the tail",
        ),
        pytest.param(
            (2, 2, 1, 4, 1),
            (2, 2, 1, 8, 1),
            (1, 1),
            (0, 16),
            [(0, 0, 0, 0, 4), (1, 0, 0, 4, 4)],
            id="rows run on although token numbers have gaps",
        ),
        pytest.param((2, 2, 1, 4, 1), (2, 2, 1, 4, 1), (0, 1), (0, 64), [], id="shards without a common token"),
        pytest.param((1, 1, 1, 4, 1), (2, 2, 4, 4, 1), (0, 1), (0, 4), [], id="a prompt shorter than a stripe"),
        pytest.param((1, 1, 1, 4, 1), (2, 2, 4, 4, 1), (0, 0), (8, 8), [], id="an empty range"),
        pytest.param(
            (1, 1, 1, 4, 1), (1, 1, 1, 4, 1), (0, 0), (4, 8), [(1, 0, 1, 0, 4)], id="an exact multiple of the block"
        ),
    ],
)
def test_runs_by_hand(prefill, decode, shards, span, expected):
    assert _rows(_plan(prefill, decode, *shards, *span)) == expected


def test_an_empty_plan_has_no_tokens_and_a_mean_of_zero():
    runs = _plan((1, 1, 1, 4, 1), (1, 1, 1, 4, 1), 0, 0, 3, 3)
    assert (len(runs), runs.total_tokens, mean_run(runs)) == (0, 0, 0.0)


def test_shared_patterns_cannot_be_changed():
    runs = _plan((1, 1, 1, 4, 1), (2, 2, 1, 4, 1), 0, 0, 0, 64)
    with pytest.raises(ValueError, match="read-only"):
        runs.src_row[0] = 3


@pytest.mark.parametrize("span", [(-1, 4), (5, 4)])
def test_an_impossible_range_is_refused(span):
    with pytest.raises(ValueError, match=r"token range \[-?\d+, 4\) has to satisfy"):
        _plan((1, 1, 1, 4, 1), (1, 1, 1, 4, 1), 0, 0, *span)


def test_different_models_are_refused_naming_both():
    prefill, decode = Sizes(1, 1, 1, 16, 1).layout(), Sizes(2, 1, 1, 16, 2).layout()
    with pytest.raises(GeometryError, match="prefill has 1 KV heads and decode 2; both roles"):
        check_pair(prefill, decode)
    with pytest.raises(GeometryError, match="prefill has 1 KV heads"):
        sources(prefill, decode, 0, "t")
    with pytest.raises(GeometryError, match="prefill has 1 KV heads"):
        destinations(prefill, decode, 0, "t")


def test_the_period_is_a_block_edge_on_both_sides():
    assert period(Sizes(3, 3, 4, 12, 1).layout(), Sizes(2, 2, 8, 16, 1).layout()) == 288


@pytest.mark.parametrize(
    ("prefill", "decode", "sharing"),
    [
        pytest.param((2, 2, 1, 16, 1), (2, 2, 1, 16, 1), {(0, 0), (1, 1)}, id="equal placement"),
        pytest.param((2, 2, 1, 16, 1), (4, 4, 1, 16, 1), {(0, 0), (0, 2), (1, 1), (1, 3)}, id="twice the shards"),
        pytest.param((2, 2, 4, 16, 1), (2, 2, 1, 16, 1), {(0, 0), (0, 1), (1, 0), (1, 1)}, id="other interleave"),
        pytest.param((1, 1, 1, 16, 1), (2, 2, 8, 16, 1), {(0, 0), (0, 1)}, id="one prefill shard"),
        pytest.param((1, 1, 1, 16, 1), (1, 1, 1, 16, 1), {(0, 0)}, id="no shards at all"),
    ],
)
def test_which_shards_have_tokens_in_common(prefill, decode, sharing):
    p, d = Sizes(*prefill).layout(), Sizes(*decode).layout()
    found = {(a, b) for a in range(p.dcp_size) for b in range(d.dcp_size) if shares_tokens(p, d, a, b)}
    assert found == sharing


@pytest.mark.parametrize(
    ("prefill", "decode", "decode_rank", "expected"),
    [
        pytest.param((1, 1, 1, 16, 1), (2, 2, 1, 16, 1), 1, (Source(0, 0, (0,)),), id="one prefill rank feeds all"),
        pytest.param(
            (2, 1, 1, 16, 4),
            (1, 1, 1, 16, 4),
            0,
            (Source(0, 0, (0, 1)), Source(1, 0, (2, 3))),
            id="heads come together",
        ),
        pytest.param((1, 1, 1, 16, 4), (4, 1, 1, 16, 4), 2, (Source(0, 0, (2,)),), id="heads are split"),
        pytest.param(
            (2, 2, 16, 16, 1), (1, 1, 1, 16, 1), 0, (Source(0, 0, (0,)), Source(1, 1, (0,))), id="shards come together"
        ),
        pytest.param((2, 2, 1, 16, 1), (2, 2, 1, 16, 1), 1, (Source(1, 1, (0,)),), id="shard to equal shard"),
        pytest.param(
            (4, 2, 1, 16, 2),
            (2, 1, 1, 16, 2),
            1,
            (Source(2, 0, (1,)), Source(3, 1, (1,))),
            id="sharded replicas of the second head",
        ),
    ],
)
def test_sources_by_hand(prefill, decode, decode_rank, expected):
    assert sources(Sizes(*prefill).layout(), Sizes(*decode).layout(), decode_rank, "any") == expected


@pytest.mark.parametrize(
    ("transfer_id", "ranks_of_head_0", "ranks_of_head_1"),
    [("cmpl-7", [0, 1], [4, 7]), ("", [0, 1], [4, 5]), ("übertragung", [0, 3], [4, 5])],
)
def test_the_choice_of_replica_never_changes(transfer_id, ranks_of_head_0, ranks_of_head_1):
    # A change here is a change of the protocol: both sides compute the pairing and never exchange it.
    prefill, decode = Sizes(8, 2, 1, 16, 2).layout(), Sizes(2, 1, 1, 16, 2).layout()
    chosen = [[source.prefill_rank for source in sources(prefill, decode, rank, transfer_id)] for rank in (0, 1)]
    assert chosen == [ranks_of_head_0, ranks_of_head_1]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((8, 1, 1, 16, 1), (8, 8, 1, 16, 1)), ((4, 2, 1, 16, 1), (4, 2, 1, 16, 1)), ((8, 1, 1, 16, 2), (4, 2, 1, 16, 2))],
)
def test_replicas_share_one_transfer_evenly(prefill, decode):
    p, d = Sizes(*prefill).layout(), Sizes(*decode).layout()
    loads = [len(destinations(p, d, rank, "some transfer")) for rank in range(p.tensor_parallel_size)]
    assert max(loads) - min(loads) <= 1


def test_over_many_transfers_no_replica_is_favoured():
    prefill, decode = Sizes(4, 1, 1, 16, 1).layout(), Sizes(1, 1, 1, 16, 1).layout()
    chosen = Counter(sources(prefill, decode, 0, f"transfer-{n}")[0].prefill_rank for n in range(400))
    assert sorted(chosen) == [0, 1, 2, 3]
    assert min(chosen.values()) > 60


def test_a_long_range_is_the_pattern_of_a_short_one_shifted():
    prefill, decode = (1, 1, 1, 16, 1), (8, 8, 1, 16, 1)
    whole = _plan(prefill, decode, 0, 3, 0, 128 * 9)
    for index in range(9):
        part = _plan(prefill, decode, 0, 3, 128 * index, 128 * (index + 1))
        inside = slice(index * len(part), (index + 1) * len(part))
        np.testing.assert_array_equal(whole.src_block[inside], part.src_block)
        np.testing.assert_array_equal(whole.dst_block[inside], part.dst_block)
        np.testing.assert_array_equal(whole.src_row[inside], part.src_row)
