"""Geometry: where a side keeps a token, and which sides can't exist."""

import sys
from itertools import product
from subprocess import run

import numpy as np
import pytest

from dcp_connector.geometry import GeometryError, PageLayout, find_violations
from dcp_connector.units import cdiv
from tests.support.kv_oracle import Sizes, all_sides, deal, heads_of, is_valid, shard_of

SIDES = [
    side for heads in (1, 2, 4) for side in all_sides((1, 2, 3, 4, 6, 8, 12), range(1, 5), (1, 4, 12), (12, 24), heads)
]


@pytest.mark.parametrize(
    ("sizes", "token", "place"),
    [
        # By hand from vLLM's slot mapping: virtual block, shard, row.
        pytest.param((1, 1, 1, 16, 1), 37, (2, 0, 5), id="one shard is plain paging"),
        pytest.param((2, 2, 1, 16, 1), 37, (1, 1, 2), id="interleave 1 alternates"),
        pytest.param((2, 2, 8, 16, 1), 37, (1, 0, 5), id="interleave 8 keeps eight together"),
        pytest.param((2, 2, 8, 16, 1), 26, (0, 1, 10), id="the second stripe goes below the first"),
        pytest.param((4, 4, 16, 16, 1), 37, (0, 2, 5), id="interleave equal to the block"),
        pytest.param((3, 3, 4, 12, 1), 59, (1, 2, 7), id="three shards"),
    ],
)
def test_a_token_is_placed_where_vllm_places_it(sizes, token, place):
    assert tuple(int(part[0]) for part in Sizes(*sizes).layout().place(np.array([token]))) == place


@pytest.mark.parametrize("sizes", SIDES, ids=str)
def test_every_valid_side_agrees_with_dealing_tokens_out(sizes):
    layout, num_tokens = sizes.layout(), 130
    hands = deal(num_tokens, sizes.w, sizes.i)
    blocks, shards, rows = layout.place(np.arange(num_tokens))
    for shard, hand in enumerate(hands):
        tokens = np.array(hand, dtype=np.int64)
        assert set(shards[tokens].tolist()) <= {shard}
        np.testing.assert_array_equal(blocks[tokens] * sizes.b + rows[tokens], np.arange(len(hand)))
        np.testing.assert_array_equal(layout.token_of(shard, np.arange(len(hand))), tokens)
        assert rows.max() < sizes.b
        for length in range(num_tokens):
            assert layout.local_token_count(length, shard) == sum(token < length for token in hand)
    assert layout.num_blocks(num_tokens) == blocks.max() + 1


@pytest.mark.parametrize("sizes", SIDES, ids=str)
def test_every_valid_side_agrees_with_counting_ranks_off(sizes):
    layout = sizes.layout()
    holders = {(head, shard): [] for head in range(sizes.h) for shard in range(sizes.w)}
    for rank in range(sizes.t):
        assert list(layout.heads_of_rank(rank)) == heads_of(sizes, rank)
        assert layout.shard_of_rank(rank) == shard_of(sizes, rank)
        for index, head in enumerate(heads_of(sizes, rank)):
            assert layout.local_heads(rank, (head,)) == (index,)
            holders[head, shard_of(sizes, rank)].append(rank)
    for (head, shard), ranks in holders.items():
        assert ranks
        assert list(layout.ranks_holding(head, shard)) == ranks


def test_the_rules_refuse_exactly_the_sides_whose_ranks_do_not_fit():
    for sizes in product((1, 2, 3, 4, 6, 8, 12), range(1, 5), (1, 3, 4, 12), (12, 16), (1, 2, 3, 4)):
        t, w, i, b, h = sizes
        refused = find_violations(tensor_parallel_size=t, dcp_size=w, interleave=i, block_size=b, num_kv_heads=h)
        assert (not refused) == is_valid(Sizes(*sizes)), sizes


@pytest.mark.parametrize(
    ("sizes", "rule", "words"),
    [
        pytest.param(
            (12, 4, 1, 16, 2),
            "gqa-dcp-replicas",
            "dcp size 4 doesn't divide the 6 ranks that hold each KV head (tensor parallel size 12 / 2 KV heads), "
            "so a DCP group would mix heads; nearest dcp size that works: 3 or 6",
            id="a DCP group across two heads, which vLLM accepts",
        ),
        pytest.param(
            (8, 3, 1, 16, 1),
            "dcp-divides-tp",
            "dcp size 3 doesn't divide the 8 ranks that hold each KV head (tensor parallel size 8 / 1 KV heads), "
            "so a DCP group would mix heads; nearest dcp size that works: 2 or 4",
            id="dcp doesn't divide tensor parallel",
        ),
        pytest.param(
            (4, 8, 1, 16, 1),
            "dcp-divides-tp",
            "dcp size 8 doesn't divide the 4 ranks that hold each KV head (tensor parallel size 4 / 1 KV heads), "
            "so a DCP group would mix heads; nearest dcp size that works: 4",
            id="more shards than ranks",
        ),
        pytest.param(
            (6, 1, 1, 16, 4),
            "heads-divide-tp",
            "tensor parallel size 6 and 4 KV heads: one has to be a multiple of the other; "
            "nearest tensor parallel size that works: 4 or 8",
            id="more ranks than heads, not a multiple",
        ),
        pytest.param(
            (3, 1, 1, 16, 8),
            "heads-divide-tp",
            "tensor parallel size 3 and 8 KV heads: one has to be a multiple of the other; "
            "nearest tensor parallel size that works: 2 or 4",
            id="fewer ranks than heads, not a divisor",
        ),
        pytest.param(
            (2, 2, 1, 16, 4),
            "gqa-dcp-replicas",
            "dcp size 2 with tensor parallel size 2 and 4 KV heads: each rank holds 2 heads of its own, "
            "so no two ranks share a head's tokens; use dcp size 1 or tensor parallel size 8",
            id="split heads can't be sharded",
        ),
        pytest.param(
            (2, 2, 5, 16, 1),
            "interleave-divides-block",
            "interleave 5 doesn't divide block size 16; nearest interleave that does: 4 or 8",
            id="interleave doesn't divide the block",
        ),
        pytest.param(
            (2, 2, 32, 16, 1),
            "interleave-divides-block",
            "interleave 32 doesn't divide block size 16; nearest interleave that does: 16",
            id="interleave larger than the block",
        ),
        pytest.param((2, 2, 0, 16, 1), "size-in-range", "interleave is 0; it has to be from 1 to 1048576", id="zero"),
        pytest.param(
            (2, 2, 1, -16, 1), "size-in-range", "block size is -16; it has to be from 1 to 1048576", id="negative"
        ),
    ],
)
def test_an_impossible_side_is_refused_in_words(sizes, rule, words):
    with pytest.raises(GeometryError) as refused:
        Sizes(*sizes).layout()
    assert str(refused.value) == words
    assert [violation.rule for violation in refused.value.violations] == [rule]


@pytest.mark.timeout(5)
def test_absurd_sizes_are_refused_without_a_long_search():
    with pytest.raises(GeometryError, match="block size is 1152921504606846976; it has to be from 1 to 1048576"):
        Sizes(1, 1, 1, 2**60, 1).layout()
    with pytest.raises(GeometryError, match="nearest interleave that does: 1 or 3"):
        Sizes(2, 2, 2, 2**20 - 1, 1).layout()


def test_all_broken_rules_are_reported_at_once():
    with pytest.raises(GeometryError) as refused:
        Sizes(8, 3, 5, 16, 1).layout()
    assert [violation.rule for violation in refused.value.violations] == ["dcp-divides-tp", "interleave-divides-block"]


def test_without_shards_the_interleave_is_ignored_and_equal_layouts_are_equal():
    assert Sizes(4, 1, 5, 16, 1).layout() == Sizes(4, 1, 16, 16, 1).layout()
    assert hash(Sizes(4, 1, 5, 16, 1).layout()) == hash(Sizes(4, 1, 1, 16, 1).layout())


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        pytest.param(
            lambda side: side.shard_of_rank(4), "rank 4 is not one of the 4 tensor parallel ranks", id="rank too large"
        ),
        pytest.param(
            lambda side: side.heads_of_rank(-1), "rank -1 is not one of the 4 tensor parallel ranks", id="negative rank"
        ),
        pytest.param(lambda side: side.ranks_holding(2, 0), "head 2 is not one of the 2 KV heads", id="head too large"),
        pytest.param(lambda side: side.ranks_holding(0, 2), "shard 2 is not one of the 2 shards", id="shard of a head"),
        pytest.param(
            lambda side: side.token_of(2, np.arange(3)), "shard 2 is not one of the 2 shards", id="shard of a row"
        ),
        pytest.param(
            lambda side: side.local_token_count(5, 2), "shard 2 is not one of the 2 shards", id="shard of a count"
        ),
        pytest.param(
            lambda side: side.local_heads(0, (1,)), "rank 0 holds KV heads 0 to 0, not 1", id="head of another rank"
        ),
    ],
)
def test_a_number_out_of_range_is_refused_in_words(ask, words):
    with pytest.raises(GeometryError, match=words):
        ask(Sizes(4, 2, 1, 16, 2).layout())


def _page(**changes) -> PageLayout:
    head_major = {
        "base": 4096,
        "num_blocks": 10,
        "kernel_block_size": 8,
        "block_size": 16,
        "num_heads": 2,
        "block_stride": 8 * 2 * 100,
        "head_stride": 8 * 100,
        "row_stride": 100,
        "entry_bytes": 100,
    }
    return PageLayout(**(head_major | changes))


def test_a_page_knows_its_end_and_its_kernel_blocks():
    page = _page()
    assert page.kernel_blocks_per_block == 2
    assert page.span_bytes == 10 * 8 * 2 * 100
    assert page.end == 4096 + page.span_bytes


def test_strides_of_dimensions_with_one_element_do_not_matter():
    page = _page(num_heads=1, head_stride=0, block_stride=800)
    assert page.span_bytes == 10 * 8 * 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel_block_size": 6}, "kernel block size 6 doesn't divide block size 16"),
        ({"row_stride": 99}, "a stride of 99 bytes steps over 100 bytes of content"),
        ({"head_stride": 100}, "entries overlap"),
        ({"block_stride": 1599}, "entries overlap"),
        ({"block_stride": -1600}, "entries overlap"),
        ({"num_blocks": 0}, "counts of 1 or more"),
        ({"entry_bytes": 0}, "counts of 1 or more"),
        ({"base": -1}, "don't fit in 63 bits"),
        ({"base": 2**63 - 1000}, "don't fit in 63 bits"),
        ({"num_blocks": 2**60}, "don't fit in 63 bits"),
    ],
)
def test_a_page_that_cannot_exist_is_refused(changes, words):
    with pytest.raises(GeometryError, match=words):
        _page(**changes)


def test_cdiv_rounds_up():
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_geometry_is_usable_without_numpy():
    program = "import sys; import dcp_connector.geometry; sys.exit('numpy' in sys.modules)"
    assert run([sys.executable, "-c", program], check=False).returncode == 0
