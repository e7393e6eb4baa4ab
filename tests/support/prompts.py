"""Prompts whose lengths sit on the edges of blocks and interleaves. One character is one token of the tiny models."""

import random
import string

__all__ = ["edge_prompts", "swap_can_show"]

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
