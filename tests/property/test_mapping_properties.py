"""Mapping against brute force: every pair of valid sides in a grid, and random ones of any size."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_connector.mapping import destinations, period, plan_runs, shares_tokens, sources
from dcp_connector.tiling import verify_tiling
from tests.support.kv_oracle import Sizes, all_sides, deal, heads_of, shard_of

NUM_TOKENS = 130


@cache
def _layout(sizes):
    return sizes.layout()


def _grid(heads):
    return all_sides((1, 2, 3, 4, 6, 8, 12), range(1, 5), (1, 4, 12), (12, 24), heads)


def _moved_rows(runs, prefill, decode):
    """Return {decode row: prefill row} of a plan, rows counted over the shard's blocks; a row twice is an error."""
    columns = (runs.src_block, runs.src_row, runs.dst_block, runs.dst_row, runs.num_tokens)
    moved = {}
    for src_block, src_row, dst_block, dst_row, count in zip(*(c.tolist() for c in columns), strict=True):
        assert count > 0
        assert 0 <= src_row <= src_row + count <= prefill.b
        assert 0 <= dst_row <= dst_row + count <= decode.b
        for step in range(count):
            row = dst_block * decode.b + dst_row + step
            assert row not in moved
            moved[row] = src_block * prefill.b + src_row + step
    return moved


@cache
def _needed(prefill_placement, decode_placement, start, end):
    """Return {(prefill shard, decode shard): {decode row: prefill row}}, found by dealing out on both sides."""
    prefill_at, decode_at = (
        {token: (shard, row) for shard, hand in enumerate(deal(end, *placement)) for row, token in enumerate(hand)}
        for placement in (prefill_placement, decode_placement)
    )
    needed = {(a, b): {} for a in range(prefill_placement[0]) for b in range(decode_placement[0])}
    for token in range(start, end):
        (src_shard, src_row), (dst_shard, dst_row) = prefill_at[token], decode_at[token]
        needed[src_shard, dst_shard][dst_row] = src_row
    return needed


def _check_runs(prefill, decode, start, end):
    needed = _needed((prefill.w, prefill.i), (decode.w, decode.i), start, end)
    for (prefill_shard, decode_shard), rows in needed.items():
        runs = plan_runs(_layout(prefill), _layout(decode), prefill_shard, decode_shard, start, end)
        assert _moved_rows(runs, prefill, decode) == rows
        assert runs.total_tokens == len(rows)


def _check_pairing(prefill, decode, transfer_id):
    """Each (decode rank, head, prefill shard with common tokens) has one source, which holds that head and shard."""
    served = {rank: [] for rank in range(prefill.t)}
    for decode_rank in range(decode.t):
        supplied = []
        for source in sources(_layout(prefill), _layout(decode), decode_rank, transfer_id):
            assert shard_of(prefill, source.prefill_rank) == source.prefill_shard
            assert set(source.heads) <= set(heads_of(prefill, source.prefill_rank))
            supplied += [(head, source.prefill_shard) for head in source.heads]
            served[source.prefill_rank].append(decode_rank)
        needed = [
            (head, prefill_shard)
            for head in heads_of(decode, decode_rank)
            for prefill_shard in range(prefill.w)
            if shares_tokens(_layout(prefill), _layout(decode), prefill_shard, shard_of(decode, decode_rank))
        ]
        assert sorted(supplied) == sorted(needed)
    return served


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_every_pair_of_sides_in_the_grid_is_mapped_as_brute_force_says(heads):
    sides, num_pairs = _grid(heads), 0
    placements = {}
    for prefill in sides:
        for decode in sides:
            num_pairs += 1
            _check_pairing(prefill, decode, f"transfer-{num_pairs}")
            placements[prefill.w, prefill.i, prefill.b, decode.w, decode.i, decode.b] = prefill, decode
    for prefill, decode in placements.values():
        _check_runs(prefill, decode, 0, NUM_TOKENS)
        for a in range(prefill.w):
            for b in range(decode.w):
                common = _needed((prefill.w, prefill.i), (decode.w, decode.i), 0, 12 * 12)[a, b]
                assert shares_tokens(_layout(prefill), _layout(decode), a, b) == bool(common)
    assert num_pairs == len(sides) ** 2


def test_the_grid_has_at_least_nine_thousand_pairs():
    assert sum(len(_grid(heads)) ** 2 for heads in (1, 2, 4)) >= 9_000


@st.composite
def _sides(draw, heads):
    """Any valid side with this many heads; sizes need not divide one another across sides."""
    interleave, stripes = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    block = interleave * stripes
    if draw(st.booleans()):
        divisor = draw(st.sampled_from([d for d in range(1, heads + 1) if heads % d == 0]))
        return Sizes(heads // divisor, 1, interleave, block, heads)
    shards, replicas = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return Sizes(heads * shards * replicas, shards, interleave, block, heads)


@st.composite
def _pairs(draw):
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    return draw(_sides(heads)), draw(_sides(heads))


@settings(max_examples=300, deadline=None)
@given(pair=_pairs(), data=st.data())
def test_random_pairs_and_ranges_are_mapped_as_brute_force_says(pair, data):
    prefill, decode = pair
    end = data.draw(st.integers(0, 1500), label="end")
    _check_runs(prefill, decode, data.draw(st.integers(0, end), label="start"), end)


@settings(max_examples=150, deadline=None)
@given(pair=_pairs())
def test_shards_have_tokens_in_common_exactly_when_a_long_sequence_has_one(pair):
    prefill, decode = pair
    repeat = math.lcm(prefill.w * prefill.i, decode.w * decode.i)
    for (a, b), rows in _needed((prefill.w, prefill.i), (decode.w, decode.i), 0, repeat).items():
        assert shares_tokens(_layout(prefill), _layout(decode), a, b) == bool(rows)


@settings(max_examples=150, deadline=None)
@given(pair=_pairs(), data=st.data())
def test_ranges_of_many_periods_are_mapped_as_brute_force_says(pair, data):
    prefill, decode = pair
    repeat = period(_layout(prefill), _layout(decode))
    if repeat <= 400:
        start = data.draw(st.integers(0, 2 * repeat), label="start")
        _check_runs(prefill, decode, start, start + data.draw(st.integers(2 * repeat, 5 * repeat), label="length"))


@settings(max_examples=150, deadline=None)
@given(pair=_pairs(), data=st.data())
def test_no_two_runs_could_be_one(pair, data):
    prefill, decode = pair
    end = data.draw(st.integers(0, 600), label="end")
    shards = data.draw(st.integers(0, prefill.w - 1)), data.draw(st.integers(0, decode.w - 1))
    runs = plan_runs(_layout(prefill), _layout(decode), *shards, data.draw(st.integers(0, end)), end)
    joined = (
        (runs.src_block[1:] == runs.src_block[:-1])
        & (runs.dst_block[1:] == runs.dst_block[:-1])
        & (runs.src_row[1:] == (runs.src_row + runs.num_tokens)[:-1])
        & (runs.dst_row[1:] == (runs.dst_row + runs.num_tokens)[:-1])
    )
    assert not joined.any()
    assert (np.diff(runs.dst_block * decode.b + runs.dst_row) > 0).all()


@settings(max_examples=200, deadline=None)
@given(pair=_pairs(), transfer_id=st.text(max_size=40))
def test_both_sides_compute_the_same_pairing_and_share_the_load(pair, transfer_id):
    prefill, decode = pair
    served = _check_pairing(prefill, decode, transfer_id)
    for prefill_rank, decode_ranks in served.items():
        assert list(destinations(_layout(prefill), _layout(decode), prefill_rank, transfer_id)) == decode_ranks
    for head in range(prefill.h):
        for shard in range(prefill.w):
            replicas = _layout(prefill).ranks_holding(head, shard)
            loads = [len(served[rank]) for rank in replicas]
            assert max(loads) - min(loads) <= 1


@settings(max_examples=150, deadline=None)
@given(pair=_pairs(), data=st.data())
def test_the_proof_accepts_every_valid_pair(pair, data):
    prefill, decode = pair
    rank = data.draw(st.integers(0, decode.t - 1), label="decode rank")
    verify_tiling(_layout(prefill), _layout(decode), rank)
    end = data.draw(st.integers(0, 500), label="end")
    span = data.draw(st.integers(0, end), label="start"), end
    verify_tiling(_layout(prefill), _layout(decode), rank, token_range=span)
