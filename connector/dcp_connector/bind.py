"""From runs of rows to byte addresses: the direct path's copies.

Within a piece of n rows, with C bytes per (row, head) entry, one copy covers

    all heads of a row     when head_stride == C on both sides                               (token-major pages)
    all rows of a head     when row_stride  == C on both sides                               (head-major pages)
    all heads of all rows  when head_stride == C and row_stride == heads*C on both sides     (token-major, same heads)
    one (row, head)        otherwise

and copies that follow one another without a gap on both sides become one: whole pages, and neighbouring pages too.
`packing` builds the staged path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcp_connector.geometry import PageLayout
from dcp_connector.mapping import Runs
from dcp_connector.pages import BindError, adjacent_groups, check_heads, heads_are_one_span, resolve
from dcp_connector.units import IntArray, LocalHead

__all__ = ["BindError", "Copies", "bind", "bind_layers", "split_batches"]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Byte ranges to copy: absolute source and destination addresses and lengths in bytes, int64 arrays [n]."""

    src: IntArray
    dst: IntArray
    length: IntArray

    @staticmethod
    def single(src: int, dst: int, length: int) -> Copies:
        """Return one copy."""
        return Copies(*(np.array([value], dtype=np.int64) for value in (src, dst, length)))

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        """Bytes over all copies."""
        return int(self.length.sum())

    def __getitem__(self, part: slice) -> Copies:
        return Copies(self.src[part], self.dst[part], self.length[part])


def bind(
    runs: Runs,
    src_table: Sequence[int] | IntArray,
    dst_table: Sequence[int] | IntArray,
    src_page: PageLayout,
    dst_page: PageLayout,
    src_heads: Sequence[LocalHead],
    dst_heads: Sequence[LocalHead],
) -> Copies:
    """Return the copies of one layer. `src_heads[k]` of the source is `dst_heads[k]` of the destination (local heads).

    Tables hold scheduler block ids (not kernel blocks) and may be longer than the runs need. Raises `BindError` before
    any address is formed.
    """
    check_heads(src_page, dst_page, src_heads, dst_heads)
    pieces = resolve(runs, src_table, dst_table, src_page, dst_page)

    if heads_are_one_span(src_page, src_heads) and heads_are_one_span(dst_page, dst_heads):
        span_bytes = len(src_heads) * src_page.entry_bytes
        src_heads, dst_heads = src_heads[:1], dst_heads[:1]
    else:
        span_bytes = src_page.entry_bytes
    if src_page.row_stride != span_bytes or dst_page.row_stride != span_bytes:
        pieces = pieces.rows()

    src = pieces.src_block * src_page.block_stride + pieces.src_row * src_page.row_stride
    dst = pieces.dst_block * dst_page.block_stride + pieces.dst_row * dst_page.row_stride
    src = (src[:, None] + np.asarray(src_heads, dtype=np.int64) * src_page.head_stride).ravel() + src_page.base
    dst = (dst[:, None] + np.asarray(dst_heads, dtype=np.int64) * dst_page.head_stride).ravel() + dst_page.base
    length = np.repeat(pieces.num_rows * span_bytes, len(src_heads))
    return _merge(Copies(src, dst, length))


def bind_layers(
    runs: Runs,
    src_table: Sequence[int] | IntArray,
    dst_table: Sequence[int] | IntArray,
    pages: Sequence[tuple[PageLayout, PageLayout]],
    src_heads: Sequence[LocalHead],
    dst_heads: Sequence[LocalHead],
) -> Iterator[Copies]:
    """Yield `bind`'s copies for each (source page, destination page); layers of equal shape share the work."""
    bound: dict[tuple[PageLayout, PageLayout], Copies] = {}
    for src_page, dst_page in pages:
        shape = replace(src_page, base=0), replace(dst_page, base=0)
        if shape not in bound:
            bound[shape] = bind(runs, src_table, dst_table, *shape, src_heads, dst_heads)
        offsets = bound[shape]
        yield Copies(offsets.src + src_page.base, offsets.dst + dst_page.base, offsets.length)


def split_batches(copies: Iterable[Copies], max_descriptors: int, max_bytes: int) -> Iterator[Copies]:
    """Regroup copies, in order, into batches within both bounds; a copy longer than `max_bytes` is cut."""
    if max_descriptors < 1 or max_bytes < 1:
        raise ValueError(f"a batch needs room, got {max_descriptors} descriptors and {max_bytes} bytes")
    batch: list[Copies] = []
    room, room_bytes = max_descriptors, max_bytes
    for part in copies:
        rest = _limit_length(part, max_bytes)
        while len(rest):
            fitting = min(room, int(np.searchsorted(np.cumsum(rest.length[:room]), room_bytes, side="right")))
            batch.append(rest[:fitting])
            room, room_bytes = room - fitting, room_bytes - batch[-1].total_bytes
            rest = rest[fitting:]
            if len(rest):
                yield _concatenate(batch)
                batch, room, room_bytes = [], max_descriptors, max_bytes
    if sum(len(part) for part in batch):
        yield _concatenate(batch)


def _merge(copies: Copies) -> Copies:
    if not len(copies):
        return copies
    first = adjacent_groups(copies.src, copies.dst, copies.length)
    return Copies(copies.src[first], copies.dst[first], np.add.reduceat(copies.length, first))


def _limit_length(copies: Copies, max_bytes: int) -> Copies:
    if not len(copies) or int(copies.length.max()) <= max_bytes:
        return copies
    count = -(-copies.length // max_bytes)
    which = np.repeat(np.arange(len(copies), dtype=np.int64), count)
    before = np.cumsum(count) - count
    offset = (np.arange(len(which), dtype=np.int64) - before[which]) * max_bytes
    length = np.minimum(copies.length[which] - offset, max_bytes)
    return Copies(copies.src[which] + offset, copies.dst[which] + offset, length)


def _concatenate(parts: list[Copies]) -> Copies:
    return Copies(
        np.concatenate([part.src for part in parts]),
        np.concatenate([part.dst for part in parts]),
        np.concatenate([part.length for part in parts]),
    )
