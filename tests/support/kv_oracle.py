"""Slow, obvious answers that the mapping is checked against. Shares no code and no formula with it.

Where the product computes a token's place, this deals tokens like cards; where it computes addresses, this fills and
reads a simulated memory entry by entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np

from dcp_connector.geometry import PageLayout, SideLayout


@dataclass(frozen=True)
class Sizes:
    """The sizes of one side: tensor parallel, dcp, interleave, block, heads."""

    t: int
    w: int
    i: int
    b: int
    h: int

    def layout(self) -> SideLayout:
        return SideLayout(
            tensor_parallel_size=self.t, dcp_size=self.w, interleave=self.i, block_size=self.b, num_kv_heads=self.h
        )


@cache
def deal(num_tokens: int, num_shards: int, interleave: int) -> tuple[tuple[int, ...], ...]:
    """Deal tokens to shards, `interleave` at a time; element t of a shard's list is the token in its row t."""
    hands: list[list[int]] = [[] for _ in range(num_shards)]
    shard, dealt = 0, 0
    for token in range(num_tokens):
        hands[shard].append(token)
        dealt += 1
        if dealt == interleave:
            shard, dealt = (shard + 1) % num_shards, 0
    return tuple(tuple(hand) for hand in hands)


def heads_of(sizes: Sizes, rank: int) -> list[int]:
    """Count ranks and heads off, as vLLM's QKV projection does."""
    if sizes.t >= sizes.h:
        return [head for head in range(sizes.h) for replica in range(sizes.t // sizes.h)][rank : rank + 1]
    per_rank = sizes.h // sizes.t
    return list(range(sizes.h))[rank * per_rank : (rank + 1) * per_rank]


def shard_of(sizes: Sizes, rank: int) -> int:
    """Count off the ranks in groups of W."""
    return [position for group in range(sizes.t) for position in range(sizes.w)][rank]


def is_valid(sizes: Sizes) -> bool:
    """Decide from what ranks hold: equal heads within a group of W ranks, as many on every rank, whole stripes."""
    if sizes.t % sizes.w or (sizes.w > 1 and sizes.b % sizes.i):
        return False
    if sizes.t >= sizes.h:
        if sizes.t % sizes.h:
            return False
    elif sizes.h % sizes.t:
        return False
    groups = [range(first, first + sizes.w) for first in range(0, sizes.t, sizes.w)]
    return all(len({tuple(heads_of(sizes, rank)) for rank in group}) == 1 for group in groups) and (
        sizes.w == 1 or sizes.t >= sizes.h
    )


def all_sides(
    ts: tuple[int, ...], ws: range, interleaves: tuple[int, ...], blocks: tuple[int, ...], h: int
) -> list[Sizes]:
    """Every valid side with `h` heads; one shard counts once whatever the interleave."""
    found = [Sizes(*sizes, h) for sizes in product(ts, ws, interleaves, blocks)]
    return [sizes for sizes in found if is_valid(sizes) and not (sizes.w == 1 and sizes.i != interleaves[0])]


@dataclass(frozen=True)
class Physical:
    """The order of a tensor's dimensions in memory, outermost first, with padding bytes after each."""

    order: tuple[str, str, str, str] = ("layer", "block", "head", "row")
    padding: int = 0
    kernel_blocks_per_block: int = 1


HEAD_MAJOR = Physical()
TOKEN_MAJOR = Physical(("layer", "block", "row", "head"))


@dataclass
class Rank:
    """One rank's memory: an arena of bytes at an address of its own, with one page layout per layer."""

    sizes: Sizes
    rank: int
    address: int
    num_blocks: int
    num_layers: int
    entry_bytes: int
    physical: Physical
    memory: np.ndarray = field(init=False)
    pages: list[PageLayout] = field(init=False)

    def __post_init__(self) -> None:
        heads = len(heads_of(self.sizes, self.rank))
        kernel_block = self.sizes.b // self.physical.kernel_blocks_per_block
        counts = {
            "layer": self.num_layers,
            "block": self.num_blocks * self.physical.kernel_blocks_per_block,
            "head": heads,
            "row": kernel_block,
        }
        strides: dict[str, int] = {}
        size = self.entry_bytes
        for name in reversed(self.physical.order):
            strides[name] = size
            size = size * counts[name] + self.physical.padding
        self.memory = np.random.default_rng(self.rank + self.address).integers(128, 256, size, dtype=np.uint8)
        self.pages = [
            PageLayout(
                base=self.address + layer * strides["layer"],
                num_blocks=counts["block"],
                kernel_block_size=kernel_block,
                block_size=self.sizes.b,
                num_heads=heads,
                block_stride=strides["block"],
                head_stride=strides["head"],
                row_stride=strides["row"],
                entry_bytes=self.entry_bytes,
            )
            for layer in range(self.num_layers)
        ]

    def entry_offset(self, layer: int, block: int, head: int, row: int) -> int:
        """Walk to an entry: by kernel block, head in the rank, row in the kernel block."""
        page = self.pages[layer]
        kernel_block = block * self.physical.kernel_blocks_per_block
        while row >= page.kernel_block_size:
            kernel_block += 1
            row -= page.kernel_block_size
        local_head = heads_of(self.sizes, self.rank).index(head)
        return (
            page.base
            - self.address
            + kernel_block * page.block_stride
            + local_head * page.head_stride
            + row * page.row_stride
        )

    def fill(self, memory: np.ndarray, table: list[int], start: int, end: int) -> None:
        """Write the true entry of every token of [start, end) that belongs on this rank into `memory`."""
        hand = deal(end, self.sizes.w, self.sizes.i)[shard_of(self.sizes, self.rank)]
        for row, token in enumerate(hand):
            if token < start:
                continue
            for layer in range(self.num_layers):
                for head in heads_of(self.sizes, self.rank):
                    at = self.entry_offset(layer, table[row // self.sizes.b], head, row % self.sizes.b)
                    memory[at : at + self.entry_bytes] = entry(layer, head, token, self.entry_bytes)

    def at(self, address: int, length: int) -> np.ndarray:
        """Return the bytes at an absolute address; a copy that leaves the arena is an error, not a slice."""
        offset = address - self.address
        assert offset >= 0
        assert offset + length <= len(self.memory)
        return self.memory[offset : offset + length]


def entry(layer: int, head: int, token: int, num_bytes: int) -> np.ndarray:
    """Return a value that no other (layer, head, token) has, with every byte below 128: never like unwritten memory."""
    number, digits = (token * 8 + head) * 4 + layer, []
    for _ in range(num_bytes):
        digits.append(number % 128)
        number //= 128
    assert number == 0
    return np.array(digits, dtype=np.uint8)
