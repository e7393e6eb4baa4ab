"""Prompts whose lengths sit on the edges of blocks and interleaves. One character is one token of the tiny models."""

import random
import string
from collections.abc import Sequence

__all__ = ["edge_prompts", "pair_prompts", "swap_can_show"]

LONGEST = 700
_CHARACTERS = string.ascii_letters + string.digits + " .,;:-"


def edge_prompts(block: int, dcp: int, interleave: int) -> list[str]:
    """Return at least 30 prompts of 1 to 700 tokens, the same at every call.

    Lengths are those around multiples of the interleave, the interleave times DCP, the block, and the block times DCP
    (a virtual block), and a few between. The last ones share prefixes of one virtual block and more with each other,
    or repeat earlier prompts: with prefix caching on, they find part or all of their KV in the cache.
    """
    rng = random.Random(f"{block}/{dcp}/{interleave}")
    edges = {step * factor for step in (interleave, interleave * dcp, block, block * dcp) for factor in (1, 2, 5)}
    lengths = {1, 2, 3, 5, 333, LONGEST} | {edge + shift for edge in edges for shift in (-1, 0, 1)}
    lengths = {length for length in lengths if 1 <= length <= LONGEST}
    while len(lengths) < 26:
        lengths.add(rng.randrange(1, LONGEST))
    alone = [_text(rng, length) for length in sorted(lengths)]
    virtual_block = block * dcp
    shared = _text(rng, min(2 * virtual_block + 3, LONGEST // 2))
    cuts = (virtual_block - 1, virtual_block, virtual_block + 1, len(shared))
    related = [shared[:cut] + _text(rng, tail) for cut, tail in zip(cuts, (7, interleave, 1, 90), strict=True)]
    repeated = [alone[0], alone[len(alone) // 2], alone[-1], related[-1]]
    return [*alone, *related, *repeated]


def pair_prompts(layouts: Sequence[tuple[int, int, int]], salt: str) -> tuple[list[str], list[str]]:
    """Return prompts for a prefill and a decode engine, given as (block, dcp, interleave) each: first and later ones.

    The first have 1 to 700 tokens and nothing in common: lengths lie around multiples of the interleave, the interleave
    times DCP, the block, and the block times DCP of both sides. The later ones meet an engine that has answered the
    first, so that with prefix caching on it finds in its cache

    - everything but the last token (`virtual block * k + 1` tokens, repeated): nothing is left to fetch;
    - all but the last block (`virtual block * k` tokens, repeated, because the last token is always computed);
    - all but the last block of another prompt with the same beginning;
    - one virtual block, and a few tokens more than that are common;
    - nothing, because the common beginning is one token shorter than a virtual block.

    `salt` makes the prompts of one pair unknown to the engines of the others.
    """
    rng = random.Random(f"{salt}/{layouts}")
    edges = {
        step * factor
        for block, dcp, interleave in layouts
        for step in (interleave, interleave * dcp, block, block * dcp)
        for factor in (1, 3)
    }
    lengths = {1, 2, LONGEST} | {edge + shift for edge in edges for shift in (-1, 0, 1)}
    virtual = [block * dcp for block, dcp, _ in layouts]
    lengths |= {size * 2 + shift for size in virtual for shift in (0, 1)}
    lengths |= {rng.randrange(200, LONGEST) for _ in range(3)}
    first = [_text(rng, length) for length in sorted(lengths) if 1 <= length <= LONGEST]
    by_length = {len(prompt): prompt for prompt in first}
    later: list[str] = []
    for size in dict.fromkeys(virtual):
        whole, one_more = by_length[2 * size], by_length[2 * size + 1]
        later += [whole, one_more, whole[: 2 * size - 1] + _text(rng, 1)]
        later += [one_more[: size + 3] + _text(rng, size), one_more[: size - 1] + _text(rng, size)]
    return first, [*later, by_length[1], by_length[LONGEST]]


def swap_can_show(prompt_tokens: int, dcp: int, interleave: int) -> bool:
    """Return whether swapped shards of transferred KV can change the answer to a prompt of so many tokens.

    The tokens that count are those that decode takes from prefill: all but the last, which it computes itself.
    Attention does not depend on the order of keys, so a shard c and its mirror image W-1-c can be exchanged without a
    trace when they keep equally many of them.

    Measured at TP 2, DCP 2, on the prompts of `edge_prompts` for which this is true: 27 of 29 had other tokens at
    interleave 8, 11 of 12 at 1, 26 of 26 at 32. Of the others, none had.
    """
    counts = [0] * dcp
    for position in range(prompt_tokens - 1):
        counts[position // interleave % dcp] += 1
    return counts != counts[::-1]


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(_CHARACTERS, k=length))
