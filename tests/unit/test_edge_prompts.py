"""The prompts of the end-to-end tests: enough of them, on the edges, and able to show a swap."""

import pytest

from tests.support.prompts import edge_prompts, pair_prompts, swap_can_show

LAYOUTS = [(32, 2, 1), (32, 2, 8), (32, 2, 32), (64, 4, 16)]


@pytest.mark.parametrize(("block", "dcp", "interleave"), LAYOUTS)
def test_lengths_lie_around_every_edge(block: int, dcp: int, interleave: int) -> None:
    prompts = edge_prompts(block, dcp, interleave)
    lengths = {len(prompt) for prompt in prompts}
    assert len(prompts) >= 30
    assert (min(lengths), max(lengths)) == (1, 700)
    for edge in (interleave * dcp, block, block * dcp):
        assert {edge - 1, edge, edge + 1} - {0} <= lengths
    assert all(prompt.isascii() and prompt.isprintable() for prompt in prompts), "a character must be one token"


@pytest.mark.parametrize(("block", "dcp", "interleave"), LAYOUTS)
def test_some_are_repeated_and_some_share_a_virtual_block(block: int, dcp: int, interleave: int) -> None:
    prompts = edge_prompts(block, dcp, interleave)
    assert len(set(prompts)) < len(prompts)
    heads = [prompt[: block * dcp] for prompt in set(prompts) if len(prompt) >= block * dcp]
    assert len(set(heads)) < len(heads)
    assert edge_prompts(block, dcp, interleave) == prompts, "the same at every call"


@pytest.mark.parametrize(
    ("tokens", "interleave", "shows"),
    [
        pytest.param(1, 8, False, id="nothing is transferred of one token"),
        pytest.param(2, 8, True, id="one transferred token is on one rank only"),
        pytest.param(17, 8, False, id="sixteen transferred tokens are eight on each rank"),
        pytest.param(16, 8, True, id="fifteen are eight and seven"),
        pytest.param(33, 1, False, id="an even number, token by token"),
        pytest.param(34, 1, True, id="an odd number, token by token"),
    ],
)
def test_a_swap_shows_where_the_ranks_hold_different_numbers(tokens: int, interleave: int, shows: bool) -> None:
    assert swap_can_show(tokens, dcp=2, interleave=interleave) is shows


@pytest.mark.parametrize(("block", "dcp", "interleave"), LAYOUTS)
def test_a_third_of_the_prompts_can_show_a_swap(block: int, dcp: int, interleave: int) -> None:
    prompts = set(edge_prompts(block, dcp, interleave))
    assert sum(swap_can_show(len(prompt), dcp, interleave) for prompt in prompts) * 3 >= len(prompts)


SIDES = ((32, 2, 32), (48, 1, 48))


def test_prompts_of_a_pair_lie_around_the_edges_of_both_sides() -> None:
    first, _ = pair_prompts(SIDES, "a pair")
    lengths = {len(prompt) for prompt in first}
    assert {1, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 128, 129, 700} <= lengths
    assert len(first) == len(lengths) == len({prompt[:1] + prompt[-8:] for prompt in first})
    assert all(_common(prompt, other) < 16 for prompt in first for other in first if other != prompt)


def test_later_prompts_of_a_pair_meet_all_a_part_or_nothing_of_a_virtual_block() -> None:
    first, later = pair_prompts(SIDES, "a pair")
    for virtual_block in (64, 48):
        common = {
            (len(prompt), max(_common(prompt, other) for other in first))
            for prompt in later
            if len(prompt) in (2 * virtual_block - 1, 2 * virtual_block, 2 * virtual_block + 1, 2 * virtual_block + 3)
        }
        assert {
            (2 * virtual_block, 2 * virtual_block),  # repeated; its last block is not taken from the cache
            (2 * virtual_block + 1, 2 * virtual_block + 1),  # repeated; only the last token is missing
            (2 * virtual_block + 3, virtual_block + 3),
            (2 * virtual_block - 1, virtual_block - 1),
        } <= common


def test_prompts_of_two_pairs_have_nothing_in_common() -> None:
    here, there = pair_prompts(SIDES, "a pair")[0], pair_prompts(SIDES, "another")[0]
    assert not {prompt[:16] for prompt in here if len(prompt) > 15} & {prompt[:16] for prompt in there}


def _common(prompt: str, other: str) -> int:
    """How many characters two prompts begin with alike."""
    return next((i for i in range(len(prompt)) if prompt[: i + 1] != other[: i + 1]), len(prompt))
