"""The pack path: prefill gathers the destination's bytes into staging memory, so that whole pages are one write.

For one pair of ranks and one layer the *image* is every entry that the pair moves, in the destination's byte order:

    (row, head)                        when the heads of a row are consecutive bytes there    (token-major pages)
    (range of rows, head, row)         otherwise                                              (head-major pages)

where a range is a maximal run of consecutive destination rows within a kernel block. A consecutive byte range of the
destination is then one consecutive range of the image and one descriptor: with one prefill shard that is a whole page,
or several neighbouring ones, and at the edges of the request's token range the rows inside it. With more prefill shards
the image is as right, but a page's rows come from several ranks and the ranges are shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcp_connector.geometry import PageLayout
from dcp_connector.mapping import Runs
from dcp_connector.pages import (
    BindError,
    Pieces,
    StagedUnits,
    adjacent_groups,
    check_heads,
    heads_are_one_span,
    ragged_arange,
    resolve,
)
from dcp_connector.units import IntArray, LocalHead

__all__ = ["Image", "PackChunk", "gather_unit_bytes", "pack_chunks", "plan_image"]


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """How to build and deliver one layer's image. Offsets are from the pages' `base`; int64 arrays.

    The image is `units[k]` for k = 0, 1, ...: unit u of the source is its bytes [u*unit_bytes, (u+1)*unit_bytes).
    Descriptor j delivers the next `length[j]` bytes of the image, from `image_offset[j]` on, to `dst_offset[j]`.
    """

    unit_bytes: int
    units: IntArray
    image_offset: IntArray
    dst_offset: IntArray
    length: IntArray

    @property
    def num_bytes(self) -> int:
        """Size of the image."""
        return len(self.units) * self.unit_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PackChunk:
    """One filling of the staging buffer: run every gather, then write every descriptor.

    Descriptor j: `length[j]` bytes from `staging_offset[j]` of the buffer to absolute address `dst[j]`.
    """

    gathers: tuple[StagedUnits, ...]
    staging_offset: IntArray
    dst: IntArray
    length: IntArray
    num_bytes: int


def gather_unit_bytes(page: PageLayout) -> int:
    """Return the gather unit of a source page: the largest divisor of entry_bytes and of every stride in use."""
    strides = (
        (page.num_blocks, page.block_stride),
        (page.num_heads, page.head_stride),
        (page.kernel_block_size, page.row_stride),
    )
    return math.gcd(page.entry_bytes, *(stride for size, stride in strides if size > 1))


def plan_image(
    runs: Runs,
    src_table: Sequence[int] | IntArray,
    dst_table: Sequence[int] | IntArray,
    src_page: PageLayout,
    dst_page: PageLayout,
    src_heads: Sequence[LocalHead],
    dst_heads: Sequence[LocalHead],
) -> Image:
    """Return the image of one layer; arguments and `BindError` as in `bind.bind`, bases are not used."""
    check_heads(src_page, dst_page, src_heads, dst_heads)
    rows = resolve(runs, src_table, dst_table, src_page, dst_page).rows()
    src_head = np.asarray(src_heads, dtype=np.int64) * src_page.head_stride
    dst_head = np.asarray(dst_heads, dtype=np.int64) * dst_page.head_stride
    entry_bytes = dst_page.entry_bytes

    src_row = rows.src_block * src_page.block_stride + rows.src_row * src_page.row_stride
    dst_row = rows.dst_block * dst_page.block_stride + rows.dst_row * dst_page.row_stride
    if heads_are_one_span(dst_page, dst_heads):
        src = (src_row[:, None] + src_head).ravel()
        dst = dst_row + dst_head[0]
        length = np.full(len(dst), len(dst_heads) * entry_bytes, dtype=np.int64)
    else:
        order, head = _range_head_row(rows, len(dst_heads))
        src = src_row[order] + src_head[head]
        dst = dst_row[order] + dst_head[head]
        length = np.full(len(dst), entry_bytes, dtype=np.int64)

    unit_bytes = gather_unit_bytes(src_page)
    units = src // unit_bytes
    if unit_bytes != entry_bytes:
        units = (units[:, None] + np.arange(entry_bytes // unit_bytes, dtype=np.int64)).ravel()
    units.setflags(write=False)
    image_offset = np.cumsum(length) - length
    first = adjacent_groups(image_offset, dst, length)
    return Image(
        unit_bytes=unit_bytes,
        units=units,
        image_offset=image_offset[first],
        dst_offset=dst[first],
        length=np.diff(image_offset[first], append=len(units) * unit_bytes),
    )


def pack_chunks(
    runs: Runs,
    src_table: Sequence[int] | IntArray,
    dst_table: Sequence[int] | IntArray,
    pages: Sequence[tuple[PageLayout, PageLayout]],
    src_heads: Sequence[LocalHead],
    dst_heads: Sequence[LocalHead],
    *,
    staging_bytes: int,
    max_descriptors: int,
) -> Iterator[PackChunk]:
    """Yield chunks that together move every run of every (source page, destination page), one page pair per layer.

    Each chunk fills at most `staging_bytes` and has at most `max_descriptors` descriptors, over as many layers as fit.
    A layer that fits a chunk is kept whole. Raises `BindError` before the first chunk, also when the buffer is smaller
    than one entry.
    """
    images: dict[tuple[PageLayout, PageLayout], Image] = {}
    shapes = [(replace(src_page, base=0), replace(dst_page, base=0)) for src_page, dst_page in pages]
    for src_page, dst_page in shapes:
        if staging_bytes < src_page.entry_bytes or max_descriptors < 1:
            raise BindError(
                f"staging of {staging_bytes} bytes and {max_descriptors} descriptors can't hold one entry of "
                f"{src_page.entry_bytes} bytes"
            )
        if (src_page, dst_page) not in images:
            image = plan_image(runs, src_table, dst_table, src_page, dst_page, src_heads, dst_heads)
            limit = staging_bytes // src_page.entry_bytes * src_page.entry_bytes
            images[src_page, dst_page] = _limit_length(image, limit)
    return _fill_chunks(
        [(images[shape], dst_page.base) for shape, (_, dst_page) in zip(shapes, pages, strict=True)],
        staging_bytes,
        max_descriptors,
    )


def _fill_chunks(layers: list[tuple[Image, int]], staging_bytes: int, max_descriptors: int) -> Iterator[PackChunk]:
    builder = _ChunkBuilder(staging_bytes, max_descriptors)
    for layer, (image, dst_base) in enumerate(layers):
        if not builder.fits(image) and _ChunkBuilder(staging_bytes, max_descriptors).fits(image):
            yield from builder.flush()
        taken = 0
        while taken < len(image.length):
            count = builder.take(layer, image, dst_base, taken)
            taken += count
            if taken < len(image.length):
                yield from builder.flush()
    yield from builder.flush()


class _ChunkBuilder:
    """Collects descriptors of successive layers until the buffer or the descriptor limit is full."""

    def __init__(self, staging_bytes: int, max_descriptors: int) -> None:
        self._staging_bytes = staging_bytes
        self._max_descriptors = max_descriptors
        self._reset()

    def _reset(self) -> None:
        self._gathers: list[StagedUnits] = []
        self._descriptors: list[tuple[IntArray, IntArray, IntArray]] = []
        self._room_bytes = self._staging_bytes
        self._room = self._max_descriptors

    def fits(self, image: Image) -> bool:
        return image.num_bytes <= self._room_bytes and len(image.length) <= self._room

    def take(self, layer: int, image: Image, dst_base: int, first: int) -> int:
        """Add as many descriptors of an image as fit, from number `first` on, and return how many that was."""
        lengths = image.length[first : first + self._room]
        count = int(np.searchsorted(np.cumsum(lengths), self._room_bytes, side="right"))
        if not count:
            return 0
        part = slice(first, first + count)
        begin = int(image.image_offset[first])
        num_bytes = int(image.length[part].sum())
        used = self._staging_bytes - self._room_bytes
        units = image.units
        if num_bytes != image.num_bytes:
            units = units[begin // image.unit_bytes : (begin + num_bytes) // image.unit_bytes]
        self._gathers.append(StagedUnits(layer, used, image.unit_bytes, units))
        self._descriptors.append(
            (image.image_offset[part] - begin + used, image.dst_offset[part] + dst_base, image.length[part])
        )
        self._room_bytes -= num_bytes
        self._room -= count
        return count

    def flush(self) -> Iterator[PackChunk]:
        """Yield what was collected, if anything, and start anew."""
        if self._gathers:
            offsets, dst, length = (np.concatenate(arrays) for arrays in zip(*self._descriptors, strict=True))
            used = self._staging_bytes - self._room_bytes
            yield PackChunk(tuple(self._gathers), offsets, dst, length, used)
        self._reset()


def _range_head_row(rows: Pieces, num_heads: int) -> tuple[IntArray, IntArray]:
    """Return (row, head) indices in the order: maximal range of consecutive rows in a kernel block, head, row.

    A next block starts a range because its row is 0, or not the next one; the order only decides what merges.
    """
    ones = np.ones(len(rows.dst_row), dtype=np.int64)
    first = adjacent_groups(rows.dst_row, rows.dst_row, ones)
    size = np.diff(first, append=len(rows.dst_row)).astype(np.int64)
    order = ragged_arange(np.repeat(first, num_heads), np.repeat(size, num_heads))
    head = np.repeat(np.tile(np.arange(num_heads, dtype=np.int64), len(first)), np.repeat(size, num_heads))
    return order, head


def _limit_length(image: Image, limit: int) -> Image:
    """Cut descriptors longer than `limit`, a multiple of the entry size."""
    if not len(image.length) or int(image.length.max()) <= limit:
        return image
    count = -(-image.length // limit)
    which = np.repeat(np.arange(len(count), dtype=np.int64), count)
    offset = ragged_arange(np.zeros(len(count), dtype=np.int64), count) * limit
    return replace(
        image,
        image_offset=image.image_offset[which] + offset,
        dst_offset=image.dst_offset[which] + offset,
        length=np.minimum(image.length[which] - offset, limit),
    )
