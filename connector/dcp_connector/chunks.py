"""The scatter path's stream: the entries that a rank pair moves, in an order that both sides know without a message.

With several prefill shards a page's rows come from several ranks, so no rank can write whole pages. Instead prefill
gathers its part into staging memory, sends it as a few large writes into staging memory of decode, and decode scatters
it. The stream of one pair is, for layer after layer in the order of the pull,

    (row, head)     rows in token order (`Runs`), heads ascending

and a chunk is the next run of whole rows that fits a slot. Both follow from the handshake and the pull alone: prefill
finds the entries by its own block table and page, decode by its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcp_connector.geometry import PageLayout
from dcp_connector.pages import BindError, StagedUnits, heads_are_one_span, row_offsets
from dcp_connector.units import IntArray, LocalHead

__all__ = ["Chunk", "Entries", "Part", "locate_layers", "plan_chunks", "row_bytes", "staged"]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [first_row, first_row + num_rows) of one layer, which begin `offset` bytes into the slot."""

    layer: int
    """Index into the layers of the pull."""
    first_row: int
    num_rows: int
    offset: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one filling of a slot holds: its first `num_bytes` bytes."""

    parts: tuple[Part, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Where one side keeps a layer's rows: row r is units [r*k, (r+1)*k) with k = `units_per_row`.

    Unit u is the bytes [u*unit_bytes, (u+1)*unit_bytes) from the page's `base` on.
    """

    unit_bytes: int
    units_per_row: int
    units: IntArray


def row_bytes(pages: Sequence[PageLayout], num_heads: int) -> tuple[int, ...]:
    """Return the bytes of one row of the stream in each layer: `num_heads` entries."""
    return tuple(num_heads * page.entry_bytes for page in pages)


def plan_chunks(num_rows: int, bytes_per_row: Sequence[int], slot_bytes: int) -> tuple[Chunk, ...]:
    """Cut the stream of `num_rows` rows in each layer into chunks of at most `slot_bytes`.

    The only thing that both sides must compute alike, so it takes nothing but sizes. Raises `BindError` when a slot
    can't hold one row.
    """
    if num_rows and bytes_per_row and slot_bytes < max(bytes_per_row):
        raise BindError(f"a staging slot of {slot_bytes} bytes can't hold one row of {max(bytes_per_row)} bytes")
    return tuple(_cut(num_rows, bytes_per_row, slot_bytes))


def _cut(num_rows: int, bytes_per_row: Sequence[int], slot_bytes: int) -> Iterator[Chunk]:
    parts: list[Part] = []
    used = 0
    for layer, size in enumerate(bytes_per_row):
        done = 0
        while done < num_rows:
            count = min(num_rows - done, (slot_bytes - used) // size)
            if count:
                parts.append(Part(layer, done, count, used))
                done, used = done + count, used + count * size
            if done < num_rows:
                yield Chunk(tuple(parts), used)
                parts, used = [], 0
    if parts:
        yield Chunk(tuple(parts), used)


def locate_layers(
    side: str,
    blocks: IntArray,
    rows: IntArray,
    num_tokens: IntArray,
    table: Sequence[int] | IntArray,
    pages: Sequence[PageLayout],
    heads: Sequence[LocalHead],
) -> tuple[Entries, ...]:
    """Return where one side keeps the rows of every layer; `side` is "source" or "destination", for messages.

    `blocks`, `rows` and `num_tokens` are that side's arrays of `Runs`. Layers of equal shape share one object. Raises
    `BindError` before any address is formed.
    """
    found: dict[PageLayout, Entries] = {}
    for page in pages:
        shape = replace(page, base=0)
        if shape not in found:
            found[shape] = _locate(side, row_offsets(side, blocks, rows, num_tokens, table, shape), shape, heads)
    return tuple(found[replace(page, base=0)] for page in pages)


def _locate(side: str, row_offset: IntArray, page: PageLayout, heads: Sequence[LocalHead]) -> Entries:
    outside = [head for head in heads if not 0 <= head < page.num_heads]
    if outside or not heads:
        raise BindError(f"{side} heads {list(heads)} aren't heads of a tensor with {page.num_heads}")
    if heads_are_one_span(page, heads):
        heads_at, span_bytes = [heads[0] * page.head_stride], len(heads) * page.entry_bytes
    else:
        heads_at, span_bytes = [head * page.head_stride for head in heads], page.entry_bytes
    strides = (page.num_blocks, page.block_stride), (page.kernel_block_size, page.row_stride)
    unit_bytes = math.gcd(span_bytes, *heads_at, *(stride for size, stride in strides if size > 1))
    spans = ((row_offset[:, None] + np.asarray(heads_at, dtype=np.int64)) // unit_bytes).ravel()
    per_span = span_bytes // unit_bytes
    if per_span > 1:
        spans = (spans[:, None] + np.arange(per_span, dtype=np.int64)).ravel()
    spans.setflags(write=False)
    return Entries(unit_bytes, len(heads_at) * per_span, spans)


def staged(chunk: Chunk, layers: Sequence[Entries]) -> tuple[StagedUnits, ...]:
    """Return a chunk as units of one side's tensors, in the order in which they lie in the slot."""
    items: list[StagedUnits] = []
    for part in chunk.parts:
        entries = layers[part.layer]
        k = entries.units_per_row
        units = entries.units
        if part.first_row or part.num_rows * k != len(units):
            units = units[part.first_row * k : (part.first_row + part.num_rows) * k]
        items.append(StagedUnits(part.layer, part.offset, entries.unit_bytes, units))
    return tuple(items)
