"""Bounds-checked rows inside kernel blocks: what `bind` and `packing` both start from.

Nothing becomes an address before every block id, row, head and size has been checked against the page that it is for:
ids come from a peer, and a wrong one would read or write another request's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcp_connector.geometry import PageLayout
from dcp_connector.mapping import Runs
from dcp_connector.units import IntArray, LayoutError, LocalHead

__all__ = [
    "BindError",
    "Pieces",
    "StagedUnits",
    "adjacent_groups",
    "check_heads",
    "heads_are_one_span",
    "ragged_arange",
    "resolve",
    "row_offsets",
]


class BindError(LayoutError):
    """A block table, block id, row, head or entry size that would lead outside a page. No address was formed."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs cut at the kernel blocks of both sides: int64 arrays of equal length, in token order.

    Piece j copies `num_rows` rows from (src_block, src_row) to (dst_block, dst_row); blocks are kernel block ids, rows
    count within a kernel block.
    """

    src_block: IntArray
    src_row: IntArray
    dst_block: IntArray
    dst_row: IntArray
    num_rows: IntArray

    def rows(self) -> Pieces:
        """Return the same copies as pieces of one row each."""
        which = np.repeat(np.arange(len(self.num_rows), dtype=np.int64), self.num_rows)
        step = ragged_arange(np.zeros(len(self.num_rows), dtype=np.int64), self.num_rows)
        return Pieces(
            src_block=self.src_block[which],
            src_row=self.src_row[which] + step,
            dst_block=self.dst_block[which],
            dst_row=self.dst_row[which] + step,
            num_rows=np.ones(len(which), dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StagedUnits:
    """Units of one layer's tensor and their place in staging memory: [staging_offset, + len(units)*unit_bytes).

    The tensor is the bytes from its page's `base` on, seen as [span_bytes // unit_bytes, unit_bytes]; `units` are
    indices of its first dimension, in the order in which they lie in staging memory. Gathering reads the tensor
    (numpy.take, torch.index_select), scattering writes it (numpy.put, torch.index_copy_). Layers of equal shape share
    the array object, so a copy of it on a device can be reused.
    """

    layer: int
    """Index into the layers of the pull."""
    staging_offset: int
    unit_bytes: int
    units: IntArray


def resolve(
    runs: Runs,
    src_table: Sequence[int] | IntArray,
    dst_table: Sequence[int] | IntArray,
    src_page: PageLayout,
    dst_page: PageLayout,
) -> Pieces:
    """Look up block ids and cut runs at kernel block edges. Raises `BindError` when anything would be out of bounds."""
    src_ids = _block_ids("source", src_table, runs.src_block, runs.src_row, runs.num_tokens, src_page)
    dst_ids = _block_ids("destination", dst_table, runs.dst_block, runs.dst_row, runs.num_tokens, dst_page)
    pieces = Pieces(
        src_block=src_ids * src_page.kernel_blocks_per_block,
        src_row=runs.src_row,
        dst_block=dst_ids * dst_page.kernel_blocks_per_block,
        dst_row=runs.dst_row,
        num_rows=runs.num_tokens,
    )
    pieces = _cut(pieces, pieces.src_row, src_page.kernel_block_size)
    pieces = _cut(pieces, pieces.dst_row, dst_page.kernel_block_size)
    return replace(
        pieces,
        src_block=pieces.src_block + pieces.src_row // src_page.kernel_block_size,
        src_row=pieces.src_row % src_page.kernel_block_size,
        dst_block=pieces.dst_block + pieces.dst_row // dst_page.kernel_block_size,
        dst_row=pieces.dst_row % dst_page.kernel_block_size,
    )


def row_offsets(
    side: str,
    blocks: IntArray,
    rows: IntArray,
    num_tokens: IntArray,
    table: Sequence[int] | IntArray,
    page: PageLayout,
) -> IntArray:
    """Return where each row of the runs begins on one side, in bytes from the page's `base`, head 0, in token order.

    `blocks`, `rows` and `num_tokens` are the side's arrays of `Runs`. Raises `BindError` when anything would be out of
    bounds.
    """
    ids = _block_ids(side, table, blocks, rows, num_tokens, page)
    which = np.repeat(np.arange(len(num_tokens), dtype=np.int64), num_tokens)
    row = rows[which] + ragged_arange(np.zeros(len(num_tokens), dtype=np.int64), num_tokens)
    kernel_block = ids[which] * page.kernel_blocks_per_block + row // page.kernel_block_size
    return kernel_block * page.block_stride + row % page.kernel_block_size * page.row_stride


def check_heads(
    src_page: PageLayout, dst_page: PageLayout, src_heads: Sequence[LocalHead], dst_heads: Sequence[LocalHead]
) -> None:
    """Raise `BindError` unless the head lists pair up, lie within the tensors, and both sides' entries are equal."""
    if src_page.entry_bytes != dst_page.entry_bytes:
        raise BindError(
            f"one (token, head) entry has {src_page.entry_bytes} bytes in the source and {dst_page.entry_bytes} in the "
            "destination; both roles need the same model, KV cache dtype and head size"
        )
    if len(src_heads) != len(dst_heads) or not src_heads:
        raise BindError(f"{len(src_heads)} source heads can't be paired with {len(dst_heads)} destination heads")
    for side, heads, page in (("source", src_heads, src_page), ("destination", dst_heads, dst_page)):
        outside = [head for head in heads if not 0 <= head < page.num_heads]
        if outside or len(set(heads)) != len(heads):
            raise BindError(f"{side} heads {list(heads)} aren't distinct heads of a tensor with {page.num_heads}")


def heads_are_one_span(page: PageLayout, heads: Sequence[LocalHead]) -> bool:
    """Tell whether these heads of one row are consecutive bytes, in this order."""
    if len(heads) == 1:
        return True
    return page.head_stride == page.entry_bytes and list(heads) == list(range(heads[0], heads[0] + len(heads)))


def ragged_arange(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return arange(starts[j], starts[j] + lengths[j]) for every j, one after another."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)


def adjacent_groups(src: IntArray, dst: IntArray, length: IntArray) -> IntArray:
    """Return where each maximal group of copies starts that follow one another without a gap on both sides."""
    starts_group = np.ones(len(length), dtype=np.bool_)
    starts_group[1:] = (src[1:] != src[:-1] + length[:-1]) | (dst[1:] != dst[:-1] + length[:-1])
    return np.flatnonzero(starts_group)


def _block_ids(
    side: str,
    table: Sequence[int] | IntArray,
    blocks: IntArray,
    rows: IntArray,
    num_rows: IntArray,
    page: PageLayout,
) -> IntArray:
    """Return the scheduler block id of each run, having checked that all of its rows lie inside the page."""
    if not len(blocks):
        return np.zeros(0, dtype=np.int64)
    ids = np.asarray(table, dtype=np.int64)
    lowest, highest = int(blocks.min()), int(blocks.max())
    if lowest < 0 or highest >= len(ids):
        raise BindError(f"the {side} block table has {len(ids)} blocks; the copy needs blocks {lowest} to {highest}")
    if int(rows.min()) < 0 or int((rows + num_rows).max()) > page.block_size or int(num_rows.min()) < 1:
        raise BindError(f"a run leaves the {page.block_size} rows of its {side} block")
    used = ids[blocks]
    limit = page.num_blocks // page.kernel_blocks_per_block
    outside = used[(used < 0) | (used >= limit)]
    if len(outside):
        raise BindError(f"{side} block id {int(outside[0])} is outside the {limit} blocks of that rank's cache")
    return used


def _cut(pieces: Pieces, rows: IntArray, kernel_block_size: int) -> Pieces:
    """Cut pieces where `rows` (their first row, on one side) passes a multiple of `kernel_block_size`."""
    first = rows // kernel_block_size
    count = (rows + pieces.num_rows - 1) // kernel_block_size - first + 1
    if not len(count) or int(count.max()) == 1:
        return pieces
    which = np.repeat(np.arange(len(rows), dtype=np.int64), count)
    edge = ragged_arange(first, count) * kernel_block_size
    begin = np.maximum(rows[which], edge) - rows[which]
    end = np.minimum(rows[which] + pieces.num_rows[which], edge + kernel_block_size) - rows[which]
    return Pieces(
        src_block=pieces.src_block[which],
        src_row=pieces.src_row[which] + begin,
        dst_block=pieces.dst_block[which],
        dst_row=pieces.dst_row[which] + begin,
        num_rows=end - begin,
    )
