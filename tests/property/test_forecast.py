"""`dcpctl kv-plan`'s forecast against counting by hand: tokens dealt out like cards, bytes laid out one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_connector.forecast import Delivery, Forecast, Question, faster, forecast
from dcp_connector.paths import CHUNK_BYTES
from tests.support.kv_oracle import Sizes, all_sides, deal, heads_of, shard_of

LAYERS = 3
SIDES = {h: all_sides((1, 2, 4, 8, 6), range(1, 5), (1, 2, 8), (8, 16), h) for h in (1, 2, 4)}


@st.composite
def questions(draw: st.DrawFn) -> tuple[Sizes, Sizes, Question]:
    sides = SIDES[draw(st.sampled_from(list(SIDES)))]
    prefill, decode = draw(st.sampled_from(sides)), draw(st.sampled_from(sides))
    entry_bytes, transport = draw(st.sampled_from([(7, "tcp"), (1200, "rdma"), (9000, "tcp"), (70_000, "tcp")]))
    num_tokens = draw(st.integers(1, 200))
    return prefill, decode, Question(prefill.layout(), decode.layout(), num_tokens, entry_bytes, LAYERS, transport)  # type: ignore[arg-type]


def row_of(sizes: Sizes, num_tokens: int) -> dict[int, int]:
    """The row of each token on its own shard."""
    return {token: row for hand in deal(num_tokens, sizes.w, sizes.i) for row, token in enumerate(hand)}


def address(sizes: Sizes, row: int, local_head: int, entry_bytes: int) -> int:
    """Where a rank keeps an entry: [block, head, row], with a gap behind every block."""
    block, within = divmod(row, sizes.b)
    heads_per_rank = len(heads_of(sizes, 0))
    return ((2 * block * heads_per_rank + local_head) * sizes.b + within) * entry_bytes


def runs(starts: list[tuple[int, int]], length: int) -> tuple[int, int]:
    """Count runs of (source, destination) addresses by destination: consecutive on both sides, and on the second."""
    starts = sorted(starts, key=lambda pair: pair[1])
    gaps = [(b[0] - a[0] != length, b[1] - a[1] != length) for a, b in pairwise(starts)]
    return 1 + sum(src or dst for src, dst in gaps), 1 + sum(dst for _, dst in gaps)


def check_delivery(prefill: Sizes, decode: Sizes, question: Question, tokens: list[int], each: Delivery) -> None:
    ranges = [[tokens[0], tokens[0]]]
    for token in tokens[1:]:
        if token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    assert each.num_tokens == len(tokens)
    assert each.num_ranges == len(ranges)
    assert [list(pair) for pair in each.ranges] == ranges[:8]
    src_rows, dst_rows = row_of(prefill, question.num_tokens), row_of(decode, question.num_tokens)
    held, wanted = heads_of(prefill, each.prefill_rank), heads_of(decode, each.decode_rank)
    size = question.entry_bytes
    starts = [
        (
            address(prefill, src_rows[token], held.index(head), size),
            address(decode, dst_rows[token], wanted.index(head), size),
        )
        for token in tokens
        for head in each.heads
    ]
    direct, packed = runs(starts, size)
    assert each.num_bytes == len(starts) * size * LAYERS
    expected = {
        "direct": direct * LAYERS,
        "pack": packed * LAYERS,
        "scatter": -(-each.num_bytes // CHUNK_BYTES[question.transport]),
    }
    assert each.num_fragments == expected[each.path]


def check(prefill: Sizes, decode: Sizes, question: Question, plan: Forecast) -> None:
    prefill_shard = {t: c for c, hand in enumerate(deal(question.num_tokens, prefill.w, prefill.i)) for t in hand}
    decode_hands = deal(question.num_tokens, decode.w, decode.i)
    needed = {
        (rank, head, token)
        for rank in range(decode.t)
        for head in heads_of(decode, rank)
        for token in decode_hands[shard_of(decode, rank)]
    }
    supplied: list[tuple[int, int, int]] = []
    for each in plan.deliveries:
        assert set(each.heads) <= set(heads_of(prefill, each.prefill_rank))
        tokens = [
            token
            for token in decode_hands[shard_of(decode, each.decode_rank)]
            if prefill_shard[token] == shard_of(prefill, each.prefill_rank)
        ]
        check_delivery(prefill, decode, question, tokens, each)
        supplied += [(each.decode_rank, head, token) for head in each.heads for token in tokens]
    assert len(supplied) == len(set(supplied))
    assert set(supplied) == needed
    assert plan.num_bytes == len(needed) * question.entry_bytes * LAYERS
    assert set(plan.idle_prefill_ranks) == set(range(prefill.t)) - {each.prefill_rank for each in plan.deliveries}


@settings(max_examples=150, deadline=None)
@given(asked=questions())
def test_every_token_of_every_head_is_delivered_once_and_counted_as_by_hand(
    asked: tuple[Sizes, Sizes, Question],
) -> None:
    check(*asked, forecast(asked[2]))


@settings(max_examples=30, deadline=None)
@given(asked=questions())
def test_what_is_said_to_be_faster_copies_less_or_has_far_fewer_fragments(
    asked: tuple[Sizes, Sizes, Question],
) -> None:
    best = forecast(asked[2])
    for hint in faster(best):
        assert hint.result.num_bytes == best.num_bytes
        assert hint.result == forecast(hint.result.question)
        saves = hint.result.copies < best.copies
        assert saves or (hint.result.copies == best.copies and hint.result.num_fragments * 2 <= best.num_fragments)
        best = hint.result


@pytest.mark.parametrize(
    ("prefill", "decode", "heads", "entry_bytes", "transport", "path"),
    [
        ((4, 1, 64, 64), (8, 8, 64, 64), 1, 1152, "tcp", "direct"),
        ((4, 1, 256, 256), (8, 8, 1, 256), 1, 1152, "tcp", "pack"),
        ((4, 1, 16, 16), (8, 8, 1, 16), 1, 1152, "tcp", "scatter"),
        ((4, 1, 16, 16), (8, 8, 1, 16), 1, 1152, "rdma", "pack"),
        ((4, 4, 1, 16), (8, 8, 2, 16), 1, 1152, "rdma", "scatter"),
    ],
)
def test_the_path_is_the_one_that_a_transfer_takes(
    prefill: tuple[int, ...], decode: tuple[int, ...], heads: int, entry_bytes: int, transport: str, path: str
) -> None:
    sides = Sizes(*prefill, heads), Sizes(*decode, heads)
    question = Question(sides[0].layout(), sides[1].layout(), 4096, entry_bytes, LAYERS, transport)  # type: ignore[arg-type]
    plan = forecast(question)
    assert list(plan.paths) == [path]
    check(*sides, question, plan)
