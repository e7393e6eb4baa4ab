"""Bind: addresses by hand, what merges, what is refused. Whole transfers: tests/property/test_mapping_bytes.py."""

import numpy as np
import pytest

from dcp_connector.bind import BindError, Copies, bind, bind_layers, split_batches
from dcp_connector.geometry import PageLayout
from dcp_connector.mapping import Runs
from dcp_connector.packing import pack_chunks

C = 10


def _runs(*rows):
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy()
    return Runs(*columns)


def _page(base=0, *, heads=1, rows=4, order="head", **changes):
    head_stride, row_stride = (rows * C, C) if order == "head" else (C, heads * C)
    values = {
        "base": base,
        "num_blocks": 20 * 4 // rows,
        "kernel_block_size": rows,
        "block_size": 4,
        "num_heads": heads,
        "block_stride": rows * heads * C,
        "head_stride": head_stride,
        "row_stride": row_stride,
        "entry_bytes": C,
    }
    return PageLayout(**(values | changes))


def _copies(copies):
    return list(zip(copies.src.tolist(), copies.dst.tolist(), copies.length.tolist(), strict=True))


@pytest.mark.parametrize(
    ("runs", "pages", "heads", "expected"),
    [
        # Blocks 0 and 1 of the request are blocks 3 and 4 of the source and 12 and 13 of the destination at 5000.
        pytest.param(
            [(0, 1, 1, 0, 3)], (_page(), _page(5000)), ([0], [0]), [(130, 5520, 30)], id="one run is one copy"
        ),
        pytest.param(
            [(0, 0, 0, 0, 4), (1, 0, 1, 0, 4)],
            (_page(), _page(5000)),
            ([0], [0]),
            [(120, 5480, 80)],
            id="neighbouring pages become one copy",
        ),
        pytest.param(
            [(0, 0, 1, 0, 4), (1, 0, 0, 0, 4)],
            (_page(), _page(5000)),
            ([0], [0]),
            [(120, 5520, 40), (160, 5480, 40)],
            id="neighbours on one side only stay apart",
        ),
        pytest.param(
            [(0, 0, 0, 0, 2)],
            (_page(heads=2), _page(5000, heads=2)),
            ([0, 1], [0, 1]),
            [(240, 5960, 20), (280, 6000, 20)],
            id="head-major: the rows of each head",
        ),
        pytest.param(
            [(0, 0, 0, 0, 4)],
            (_page(heads=2), _page(5000, heads=2)),
            ([0, 1], [0, 1]),
            [(240, 5960, 80)],
            id="head-major: a whole page is one copy",
        ),
        pytest.param(
            [(0, 1, 0, 0, 2)],
            (_page(heads=2, order="row"), _page(5000, heads=2, order="row")),
            ([0, 1], [0, 1]),
            [(260, 5960, 40)],
            id="token-major: rows with all heads are one copy",
        ),
        pytest.param(
            [(0, 1, 0, 0, 2)],
            (_page(heads=4, order="row"), _page(5000, heads=2, order="row")),
            ([2, 3], [0, 1]),
            [(540, 5960, 20), (580, 5980, 20)],
            id="token-major: some heads of a row are one copy",
        ),
        pytest.param(
            [(0, 1, 0, 0, 2)],
            (_page(heads=2, order="row"), _page(5000, heads=2)),
            ([0, 1], [0, 1]),
            [(260, 5960, 10), (270, 6000, 10), (280, 5970, 10), (290, 6010, 10)],
            id="different orders: one copy per row and head",
        ),
        pytest.param(
            [(0, 1, 0, 0, 2)],
            (_page(heads=2, order="row"), _page(5000, heads=2, order="row")),
            ([0, 1], [1, 0]),
            [(260, 5970, 10), (270, 5960, 10), (280, 5990, 10), (290, 5980, 10)],
            id="crossed heads never count as one span",
        ),
        pytest.param(
            [(0, 1, 0, 0, 3)],
            (_page(rows=2, block_stride=100), _page(5000)),
            ([0], [0]),
            [(610, 5480, 10), (700, 5490, 20)],
            id="a kernel block edge of the source cuts a run",
        ),
        pytest.param(
            [(0, 0, 0, 1, 3)],
            (_page(), _page(5000, rows=1, block_stride=100)),
            ([0], [0]),
            [(120, 9900, 10), (130, 10000, 10), (140, 10100, 10)],
            id="kernel blocks of one row in the destination",
        ),
        pytest.param(
            [(0, 0, 0, 0, 4)],
            (_page(rows=2), _page(5000, rows=1)),
            ([0], [0]),
            [(120, 5480, 40)],
            id="kernel blocks next to each other merge again",
        ),
        pytest.param([], (_page(), _page(5000)), ([0], [0]), [], id="nothing to copy"),
    ],
)
def test_copies_by_hand(runs, pages, heads, expected):
    assert _copies(bind(_runs(*runs), [3, 4], [12, 13], *pages, *heads)) == expected


def test_layers_of_equal_shape_differ_in_their_bases_alone():
    runs, narrow = _runs((0, 1, 0, 0, 2)), _page(7000, rows=2)
    pages = [(_page(0), _page(5000)), (_page(100_000), _page(900_000)), (_page(0), narrow)]
    first, second, third = bind_layers(runs, [3], [12], pages, [0], [0])
    assert _copies(first) == [(130, 5480, 20)]
    assert _copies(second) == [(100_130, 900_480, 20)]
    assert _copies(third) == _copies(bind(runs, [3], [12], *pages[2], [0], [0])) == [(130, 7480, 20)]


def _pack(runs, src_table, dst_table, src_page, dst_page, src_heads, dst_heads):
    pages = [(src_page, dst_page)]
    pack_chunks(runs, src_table, dst_table, pages, src_heads, dst_heads, staging_bytes=1000, max_descriptors=9)


@pytest.mark.parametrize("path", [bind, _pack])
@pytest.mark.parametrize(
    ("runs", "tables", "pages", "heads", "words"),
    [
        pytest.param(
            [(0, 0, 0, 0, 4)],
            ([20], [0]),
            (_page(), _page()),
            ([0], [0]),
            "source block id 20 is outside the 20 blocks",
            id="source block id too large",
        ),
        pytest.param(
            [(0, 0, 0, 0, 4)],
            ([0], [20]),
            (_page(), _page()),
            ([0], [0]),
            "destination block id 20 is outside the 20 blocks",
            id="destination block id too large",
        ),
        pytest.param(
            [(0, 0, 0, 0, 4)],
            ([0], [-1]),
            (_page(), _page()),
            ([0], [0]),
            "destination block id -1 is outside",
            id="negative block id",
        ),
        pytest.param(
            [(0, 0, 0, 0, 4)],
            ([0], [10]),
            (_page(), _page(rows=2, num_blocks=21)),
            ([0], [0]),
            "destination block id 10 is outside the 10 blocks",
            id="block whose last kernel block is missing",
        ),
        pytest.param(
            [(0, 0, 1, 0, 4)],
            ([0], [0]),
            (_page(), _page()),
            ([0], [0]),
            "the destination block table has 1 blocks; the copy needs blocks 1 to 1",
            id="table too short",
        ),
        pytest.param(
            [(-1, 0, 0, 0, 4)],
            ([0], [0]),
            (_page(), _page()),
            ([0], [0]),
            "the source block table has 1 blocks; the copy needs blocks -1 to -1",
            id="negative index",
        ),
        pytest.param(
            [(0, 1, 0, 0, 4)],
            ([0], [0]),
            (_page(), _page()),
            ([0], [0]),
            "a run leaves the 4 rows of its source block",
            id="rows past the block",
        ),
        pytest.param(
            [(0, 0, 0, -1, 2)],
            ([0], [0]),
            (_page(), _page()),
            ([0], [0]),
            "a run leaves the 4 rows of its destination block",
            id="negative row",
        ),
        pytest.param(
            [(0, 0, 0, 0, 0)],
            ([0], [0]),
            (_page(), _page()),
            ([0], [0]),
            "a run leaves the 4 rows of its source block",
            id="empty run",
        ),
        pytest.param(
            [(0, 0, 0, 0, 4)],
            ([0], [0]),
            (_page(), _page(heads=2)),
            ([0], [2]),
            r"destination heads \[2\] aren't distinct heads of a tensor with 2",
            id="head outside the tensor",
        ),
        pytest.param(
            [(0, 0, 0, 0, 4)],
            ([0], [0]),
            (_page(heads=2), _page(heads=2)),
            ([0, 1], [1, 1]),
            r"destination heads \[1, 1\] aren't distinct",
            id="a head twice",
        ),
        pytest.param(
            [(0, 0, 0, 0, 4)],
            ([0], [0]),
            (_page(heads=2), _page()),
            ([0, 1], [0]),
            "2 source heads can't be paired with 1 destination heads",
            id="heads that don't pair",
        ),
        pytest.param(
            [(0, 0, 0, 0, 4)],
            ([0], [0]),
            (_page(), _page(entry_bytes=9)),
            ([0], [0]),
            r"one \(token, head\) entry has 10 bytes in the source and 9 in the destination",
            id="entries of different size",
        ),
    ],
)
def test_what_is_out_of_bounds_is_refused_on_both_paths(path, runs, tables, pages, heads, words):
    with pytest.raises(BindError, match=words):
        path(_runs(*runs), *tables, *pages, *heads)


def _lengths(batches):
    return [batch.length.tolist() for batch in batches]


@pytest.mark.parametrize(
    ("parts", "max_descriptors", "max_bytes", "expected"),
    [
        pytest.param([[5, 5, 5]], 2, 100, [[5, 5], [5]], id="too many descriptors"),
        pytest.param([[60, 30, 20]], 9, 100, [[60, 30], [20]], id="too many bytes"),
        pytest.param([[60, 40], [1]], 9, 100, [[60, 40], [1]], id="exactly full"),
        pytest.param([[1], [2], [3]], 9, 100, [[1, 2, 3]], id="layers share a batch"),
        pytest.param([[1], [2, 3]], 2, 100, [[1, 2], [3]], id="a layer is continued in the next batch"),
        pytest.param([[250, 20]], 9, 100, [[100], [100], [50, 20]], id="a copy longer than a batch is cut"),
        pytest.param([[], [1], []], 9, 100, [[1]], id="empty layers"),
        pytest.param([[]], 9, 100, [], id="nothing"),
        pytest.param([], 9, 100, [], id="no layers"),
    ],
)
def test_batches_stay_within_both_bounds(parts, max_descriptors, max_bytes, expected):
    copies, at = [], 0
    for part in parts:
        length = np.array(part, dtype=np.int64)
        src = at + np.cumsum(length) - length
        copies.append(Copies(src, src + 10_000, length))
        at += int(length.sum())
    batches = list(split_batches(copies, max_descriptors, max_bytes))
    assert _lengths(batches) == expected
    moved = [span for batch in batches for span in _copies(batch)]
    ends = [src + length for src, _, length in moved]
    assert [src for src, _, _ in moved] == [0, *ends[:-1]] if moved else not at
    assert all(dst == src + 10_000 for src, dst, _ in moved)
    assert not ends or ends[-1] == at


@pytest.mark.parametrize(("max_descriptors", "max_bytes"), [(0, 10), (1, 0)])
def test_a_batch_without_room_is_refused(max_descriptors, max_bytes):
    with pytest.raises(ValueError, match="a batch needs room"):
        next(split_batches([], max_descriptors, max_bytes))
