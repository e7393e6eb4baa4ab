"""Whole arenas compared at once: what `kv_oracle` does entry by entry, for transfers of hundreds of MiB.

Prefill's memory is the pseudo-random bytes that `kv_oracle.Rank` starts with, which are never 0. Decode makes the same
bytes itself, clears its own memory before a transfer and expects exactly the prompt's entries in it afterwards.
"""

from __future__ import annotations

import numpy as np

from tests.support.kv_oracle import Physical, Rank, Sizes, deal, heads_of, shard_of


def prefill_arena(sizes: Sizes, num_blocks: int, num_layers: int, entry_bytes: int) -> Rank:
    """Make the memory of the only rank of a prefill side again: rows of a head one behind the other."""
    assert sizes.t == sizes.w == 1, "one rank without DCP"
    return Rank(sizes, 0, 0, num_blocks, num_layers, entry_bytes, Physical())


def differing_bytes(rank: Rank, table: list[int], source: Rank, source_table: list[int], end: int) -> int:
    """Count bytes of a decode rank, all zero before, that are wrong after tokens [0, end) came from `source`."""
    tokens = np.array(deal(end, rank.sizes.w, rank.sizes.i)[shard_of(rank.sizes, rank.rank)])
    rows, here, there = np.arange(len(tokens)), np.array(table), np.array(source_table)
    block = source.sizes.b
    expected = np.zeros_like(rank.memory)
    for layer in range(len(rank.pages)):
        for local, head in enumerate(heads_of(rank.sizes, rank.rank)):
            entries = _entries(source, source.memory, layer)[there[tokens // block], head, tokens % block]
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
