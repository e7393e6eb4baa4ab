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


#: The physical orders that vLLM names, outermost first, by its names: layer, block, head, row (N) and the entry (C).
VLLM_LAYOUTS: dict[str, tuple[str, ...]] = {
    "LBHNC": ("layer", "block", "head", "row"),
    "LBNHC": ("layer", "block", "row", "head"),
    "LHBNC": ("layer", "head", "block", "row"),
    "BLHNC": ("block", "layer", "head", "row"),
    "BLNHC": ("block", "layer", "row", "head"),
    "BHLNC": ("block", "head", "layer", "row"),
}


@dataclass(frozen=True)
class Physical:
    """The order of a tensor's dimensions in memory, outermost first, with padding bytes after each.

    With a dimension "kv" keys and values lie apart: each entry is a key, then in another place its value. `registered`
    says what vLLM is given for a layer: "heads first" and "rows first" are the orders of the logical dimensions,
    "one head" leaves the dimension of heads out; keys and values that lie apart are a dimension of size 2 before or
    behind the blocks ("kv first", "kv second", both rows first) or "two tensors". A value has `value_bytes`, by default
    as many as its key; only two tensors can differ in that.
    """

    order: tuple[str, ...] = ("layer", "block", "head", "row")
    padding: int = 0
    kernel_blocks_per_block: int = 1
    registered: str = "heads first"
    value_bytes: int = 0

    @property
    def parts(self) -> int:
        """Page sets of a layer."""
        return 2 if "kv" in self.order else 1


HEAD_MAJOR = Physical()
TOKEN_MAJOR = Physical(("layer", "block", "row", "head"))


@dataclass
class Rank:
    """One rank's memory: an arena of bytes at an address of its own, with a page layout per layer.

    Where keys and values lie apart there are two page layouts per layer, the key's first. A pipeline stage has the
    layers from `first_layer` on.
    """

    sizes: Sizes
    rank: int
    address: int
    num_blocks: int
    num_layers: int
    entry_bytes: int
    physical: Physical
    first_layer: int = 0
    memory: np.ndarray = field(init=False)
    pages: list[PageLayout] = field(init=False)
    strides: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        heads = len(heads_of(self.sizes, self.rank))
        kernel_block = self.sizes.b // self.physical.kernel_blocks_per_block
        parts = self.physical.parts
        counts = {
            "layer": self.num_layers,
            "kv": parts,
            "block": self.num_blocks * self.physical.kernel_blocks_per_block,
            "head": heads,
            "row": kernel_block,
        }
        value = self.physical.value_bytes or self.entry_bytes // 2
        part_bytes = [self.entry_bytes] if parts == 1 else [self.entry_bytes - value, value]
        # Outermost, keys and values are two arrays, one behind the other; elsewhere they share one.
        two_arrays = self.physical.order[0] == "kv"
        assert two_arrays or len(set(part_bytes)) == 1
        end, starts, steps = 0, list[int](), list[dict[str, int]]()
        for part, size in enumerate(part_bytes):
            strides: dict[str, int] = {}
            for name in reversed(self.physical.order[two_arrays:]):
                strides[name] = size
                size = size * counts[name] + self.physical.padding
            starts.append(end if two_arrays else part * strides.get("kv", 0))
            end = end + size if two_arrays else size
            steps.append(strides)
        self.strides = {"kv": starts[-1], **steps[0]}
        self.memory = np.random.default_rng(self.rank + self.address).integers(128, 256, end, dtype=np.uint8)
        self.pages = [
            PageLayout(
                base=self.address + starts[part] + layer * strides["layer"],
                num_blocks=counts["block"],
                kernel_block_size=kernel_block,
                block_size=self.sizes.b,
                num_heads=heads,
                block_stride=strides["block"],
                head_stride=strides["head"],
                row_stride=strides["row"],
                entry_bytes=part_bytes[part],
            )
            for layer in range(self.num_layers)
            for part, strides in enumerate(steps)
        ]

    def entry_offset(self, page: PageLayout, block: np.ndarray, head: int, row: np.ndarray) -> np.ndarray:
        """Walk to entries of a head: by block, kernel blocks within it, head in the rank, row in the kernel block."""
        kernel_block, local_row = block * self.physical.kernel_blocks_per_block, row
        while (beyond := local_row >= page.kernel_block_size).any():
            kernel_block, local_row = kernel_block + beyond, local_row - beyond * page.kernel_block_size
        local_head = heads_of(self.sizes, self.rank).index(head)
        start = page.base - self.address + local_head * page.head_stride
        return start + kernel_block * page.block_stride + local_row * page.row_stride

    def fill(self, memory: np.ndarray, table: list[int], start: int, end: int, seed: int = 0) -> None:
        """Write the true entry of every token of [start, end) that belongs on this rank into `memory`.

        `seed` tells prompts apart: it is the number of the first token.
        """
        hand = np.array(deal(end, self.sizes.w, self.sizes.i)[shard_of(self.sizes, self.rank)], dtype=np.int64)
        rows = np.flatnonzero(hand >= start)
        blocks = np.array(table, dtype=np.int64)[rows // self.sizes.b]
        parts = self.physical.parts
        for number, page in enumerate(self.pages):
            layer, part = divmod(number, parts)
            for head in heads_of(self.sizes, self.rank):
                offsets = self.entry_offset(page, blocks, head, rows % self.sizes.b)
                values = entries(self.first_layer + layer, head, seed + hand[rows], self.entry_bytes)
                first = part * (self.entry_bytes - page.entry_bytes)
                at = offsets[:, None] + np.arange(page.entry_bytes)
                memory[at] = values[:, first : first + page.entry_bytes]

    def at(self, address: int, length: int) -> np.ndarray:
        """Return the bytes at an absolute address; a copy that leaves the arena is an error, not a slice."""
        offset = address - self.address
        assert offset >= 0
        assert offset + length <= len(self.memory)
        return self.memory[offset : offset + length]


def entries(layer: int, head: int, tokens: np.ndarray, num_bytes: int) -> np.ndarray:
    """Return [token, byte]: values that no other (layer, head, token) has, with every byte below 128.

    So they are never like unwritten memory. From 8 bytes on both halves are unique and unlike each other, so that a key
    and a value that were exchanged, or that come from two tokens, show.
    """
    number = ((tokens.astype(np.int64) * 8 + head) * 8 + layer)[:, None]
    places = num_bytes // 2 if num_bytes >= 8 else num_bytes
    assert (number < 128 ** min(places, 8)).all()
    digits = number // 128 ** np.minimum(np.arange(places), 8) % 128
    return np.concatenate([digits, 127 - digits, digits], axis=1)[:, :num_bytes].astype(np.uint8)
