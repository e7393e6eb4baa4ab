"""Whole transfers, byte by byte, in simulated memory.

Every prefill (layer, head, token) holds a value of its own; after the transfer every byte of every decode rank has to
be what the oracle says: the right entry in each row of the range, and what was there before everywhere else.
"""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kv_oracle import HEAD_MAJOR, TOKEN_MAJOR, VLLM_LAYOUTS, Physical, Sizes
from tests.support.kv_transfer_sim import Case, check_bytes

PATHS = ("direct", "pack", "scatter")

#: Pairs by name: (T, W, I, B, H) of prefill and decode.
PAIRS = {
    "1 rank to 2 shards, interleave 1": ((1, 1, 1, 8, 1), (2, 2, 1, 8, 1)),
    "1 rank to 2 shards, interleave 4": ((1, 1, 1, 8, 1), (2, 2, 4, 8, 1)),
    "1 rank to 2 shards, interleave = block": ((1, 1, 1, 8, 1), (2, 2, 8, 8, 1)),
    "2 shards to 1 rank": ((2, 2, 4, 8, 1), (1, 1, 1, 8, 1)),
    "2 shards to 4 shards": ((2, 2, 1, 8, 1), (4, 4, 1, 8, 1)),
    "2 shards to 3 shards": ((2, 2, 4, 8, 1), (3, 3, 2, 6, 1)),
    "equal shards, other interleave": ((2, 2, 8, 8, 1), (2, 2, 1, 8, 1)),
    "equal shards, other block size": ((2, 2, 1, 8, 1), (2, 2, 1, 4, 1)),
    "block sizes that don't divide": ((1, 1, 1, 6, 1), (1, 1, 1, 4, 1)),
    "heads split": ((1, 1, 1, 4, 4), (4, 1, 1, 4, 4)),
    "heads joined": ((4, 1, 1, 4, 4), (2, 1, 1, 4, 4)),
    "heads replicated and sharded": ((2, 1, 1, 4, 2), (4, 2, 1, 4, 2)),
    "sharded heads to split heads": ((8, 2, 2, 4, 2), (1, 1, 1, 4, 2)),
    "replicas on both sides": ((4, 2, 2, 4, 1), (6, 3, 1, 4, 1)),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_byte_lands_where_it_belongs(pair, path):
    prefill, decode = (Sizes(*sizes) for sizes in PAIRS[pair])
    edge = decode.b * decode.w
    for start, end in ((0, 3 * edge + 1), (0, 2 * edge), (edge, 2 * edge), (edge, 3 * edge - 1), (0, 1), (edge, edge)):
        for physical in (HEAD_MAJOR, TOKEN_MAJOR):
            check_bytes(Case(prefill, decode, start, end, physical, physical, path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", list(permutations(("layer", "block", "head", "row"))), ids="-".join)
def test_every_physical_order_is_read_and_written_by_its_strides(order, path):
    case = Case(Sizes(1, 1, 1, 6, 2), Sizes(4, 2, 1, 4, 2), 8, 29, path=path)
    for padding in (0, 4, 3):
        other = Physical(order, padding)
        check_bytes(replace(case, prefill_physical=other))
        check_bytes(replace(case, decode_physical=other))
        check_bytes(replace(case, prefill_physical=other, decode_physical=other))


#: Keys and values in two tensors, or in one with a dimension of size 2 before or behind the blocks.
APART = {
    "two tensors": ("kv", "layer", "block", "head", "row"),
    "kv before blocks": ("layer", "kv", "block", "row", "head"),
    "kv behind blocks": ("layer", "block", "kv", "row", "head"),
    "kv inmost": ("block", "layer", "row", "head", "kv"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", VLLM_LAYOUTS)
def test_every_layout_that_vllm_names_is_read_and_written_by_its_strides(name, path):
    case = Case(Sizes(2, 2, 2, 6, 1), Sizes(4, 2, 1, 4, 1), 8, 29, path=path)
    heads = Case(Sizes(1, 1, 1, 6, 4), Sizes(2, 1, 1, 4, 4), 8, 29, path=path)
    for other in VLLM_LAYOUTS:
        mine, theirs = Physical(VLLM_LAYOUTS[name]), Physical(VLLM_LAYOUTS[other])
        check_bytes(replace(case, prefill_physical=mine, decode_physical=theirs))
        check_bytes(replace(heads, prefill_physical=mine, decode_physical=theirs))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", APART)
def test_keys_and_values_that_lie_apart_arrive_whatever_the_other_side_does(name, path):
    case = Case(Sizes(1, 1, 1, 6, 2), Sizes(4, 2, 1, 4, 2), 8, 29, path=path, entry_bytes=8)
    for other in (TOKEN_MAJOR, *map(Physical, APART.values())):
        check_bytes(replace(case, prefill_physical=Physical(APART[name]), decode_physical=other))
        check_bytes(replace(case, prefill_physical=other, decode_physical=Physical(APART[name], padding=3)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("prefill_ratio", "decode_ratio"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 8)])
def test_kernel_blocks_smaller_than_blocks_are_addressed_one_by_one(prefill_ratio, decode_ratio, path):
    for order in (HEAD_MAJOR.order, TOKEN_MAJOR.order):
        for padding in (0, 4):
            for prefill, decode in (
                (Sizes(1, 1, 1, 8, 2), Sizes(4, 2, 2, 8, 2)),
                (Sizes(2, 2, 1, 8, 1), Sizes(1, 1, 1, 8, 1)),
            ):
                check_bytes(
                    Case(
                        prefill,
                        decode,
                        16,
                        45,
                        Physical(order, padding, prefill_ratio),
                        Physical(order, padding, decode_ratio),
                        path,
                    )
                )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_tokens", range(1, 18))
def test_short_prompts_leave_ranks_without_tokens_untouched(num_tokens, path):
    check_bytes(Case(Sizes(1, 1, 1, 4, 1), Sizes(4, 4, 4, 8, 1), 0, num_tokens, path=path))


def test_packing_writes_whole_pages_where_direct_writes_tokens():
    case = Case(Sizes(1, 1, 1, 8, 1), Sizes(2, 2, 1, 8, 1), 0, 64, num_layers=1, staging_bytes=4096, max_descriptors=64)
    assert check_bytes(replace(case, path="direct")) == 64
    assert check_bytes(replace(case, path="pack")) <= 8


@st.composite
def _side(draw, heads):
    interleave, block_stripes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        ranks = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
        return Sizes(ranks, 1, interleave, interleave * block_stripes, heads)
    shards, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    return Sizes(heads * shards * replicas, shards, interleave, interleave * block_stripes, heads)


@st.composite
def _physical(draw, block):
    return Physical(
        order=tuple(draw(st.permutations(["layer", "block", "head", "row"]))),
        padding=draw(st.sampled_from([0, 0, 4, 5])),
        kernel_blocks_per_block=draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0])),
    )


@st.composite
def _cases(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    prefill, decode = draw(_side(heads)), draw(_side(heads))
    blocks, tail = draw(st.integers(0, 3)), draw(st.integers(0, 40))
    start = blocks * decode.b * decode.w
    entry_bytes = draw(st.sampled_from([3, 4, 6]))
    return Case(
        prefill=prefill,
        decode=decode,
        start=start,
        end=max(1, start + tail),
        prefill_physical=draw(_physical(prefill.b)),
        decode_physical=draw(_physical(decode.b)),
        path=draw(st.sampled_from(PATHS)),
        num_layers=draw(st.integers(1, 3)),
        entry_bytes=entry_bytes,
        staging_bytes=draw(st.sampled_from([entry_bytes, 40, 300])),
        max_descriptors=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=400, deadline=None)
@given(case=_cases())
def test_any_pair_in_any_memory_is_right_to_the_byte(case):
    check_bytes(case)
