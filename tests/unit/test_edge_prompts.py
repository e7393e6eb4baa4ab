"""The prompts of the end-to-end tests: enough of them, on the edges, and able to show a swap."""

import pytest

from tests.support.prompts import edge_prompts, swap_can_show

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
