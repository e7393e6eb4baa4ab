"""Whole arenas compared at once: what `kv_oracle` does entry by entry, for transfers of hundreds of MiB.

Prefill's memory is the pseudo-random bytes that `kv_oracle.Rank` starts with, which are never 0. Decode makes the same
bytes itself, clears its own memory before a transfer and expects exactly the prompt's entries in it afterwards.
"""

from __future__ import annotations

import numpy as np

from tests.support.kv_oracle import Physical, Rank, Sizes, deal, heads_of, shard_of


def prefill_arenas(sizes: Sizes, num_blocks: int, num_layers: int, entry_bytes: int) -> list[Rank]:
    """Make the memory of a prefill side's ranks again, one per shard: rows of a head one behind the other."""
    assert sizes.t == sizes.w, "one rank for each shard"
    return [Rank(sizes, rank, 0, num_blocks, num_layers, entry_bytes, Physical()) for rank in range(sizes.t)]


def differing_bytes(rank: Rank, table: list[int], sources: list[Rank], source_table: list[int], end: int) -> int:
    """Count bytes of a decode rank, all zero before, that are wrong after tokens [0, end) came from `sources`."""
    sizes = sources[0].sizes
    where = np.zeros((2, end), dtype=np.int64)  # token -> shard and row of prefill
    for shard, hand in enumerate(deal(end, sizes.w, sizes.i)):
        where[:, list(hand)] = [[shard] * len(hand), range(len(hand))]
    tokens = np.array(deal(end, rank.sizes.w, rank.sizes.i)[shard_of(rank.sizes, rank.rank)])
    here, there = np.array(table), np.array(source_table)
    expected = np.zeros_like(rank.memory)
    for source in sources:
        rows = np.flatnonzero(where[0, tokens] == source.rank)
        theirs = where[1, tokens[rows]]
        for layer in range(len(rank.pages)):
            for local, head in enumerate(heads_of(rank.sizes, rank.rank)):
                entries = _entries(source, source.memory, layer)[there[theirs // sizes.b], head, theirs % sizes.b]
                _entries(rank, expected, layer)[here[rows // rank.sizes.b], local, rows % rank.sizes.b] = entries
    return len(expected) - int(np.count_nonzero(rank.memory == expected))


def _entries(rank: Rank, memory: np.ndarray, layer: int) -> np.ndarray:
    """View one layer as [block, head, row, byte of an entry]."""
    page = rank.pages[layer]
    assert page.kernel_block_size == page.block_size, "blocks are not cut here"
    return np.lib.stride_tricks.as_strided(
        memory[page.base - rank.address :],
        (page.num_blocks, page.num_heads, page.block_size, page.entry_bytes),
        (page.block_stride, page.head_stride, page.row_stride, 1),
    )
