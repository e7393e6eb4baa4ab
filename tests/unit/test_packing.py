"""Packing: images and chunks by hand. Whole transfers are in tests/property/test_mapping_bytes.py."""

from dataclasses import replace

import pytest

from dcp_connector.bind import BindError
from dcp_connector.mapping import plan_runs
from dcp_connector.packing import gather_unit_bytes, pack_chunks, plan_image
from tests.support.kv_oracle import HEAD_MAJOR, TOKEN_MAJOR, Physical, Rank, Sizes

C = 8


def _pages(sizes, *, physical=HEAD_MAJOR, num_blocks=40, layers=1):
    rank = Rank(sizes, 0, address=0, num_blocks=num_blocks, num_layers=layers, entry_bytes=C, physical=physical)
    return rank.pages


def _image(prefill, decode, span, tables, *, physical=HEAD_MAJOR, shards=(0, 0), heads=((0,), (0,))):
    prefill, decode = Sizes(*prefill), Sizes(*decode)
    runs = plan_runs(prefill.layout(), decode.layout(), *shards, *span)
    src, dst = _pages(prefill, physical=physical)[0], _pages(decode, physical=physical)[0]
    return plan_image(runs, *tables, src, dst, *heads)


def _descriptors(image):
    columns = image.image_offset, image.dst_offset, image.length
    return [tuple(value // C for value in row) for row in zip(*(c.tolist() for c in columns), strict=True)]


@pytest.mark.parametrize(
    ("prefill", "decode", "span", "tables", "options", "units", "descriptors"),
    [
        pytest.param(
            (1, 1, 1, 4, 1),
            (2, 2, 1, 4, 1),
            (0, 8),
            ([5, 2], [7]),
            {},
            [20, 22, 8, 10],
            [(0, 28, 4)],
            id="interleave 1: a page is gathered and written at once",
        ),
        pytest.param(
            (1, 1, 1, 4, 1),
            (2, 2, 1, 4, 1),
            (0, 8),
            ([5, 2], [7]),
            {"shards": (0, 1)},
            [21, 23, 9, 11],
            [(0, 28, 4)],
            id="interleave 1: the other shard",
        ),
        pytest.param(
            (1, 1, 1, 4, 1),
            (2, 2, 1, 4, 1),
            (2, 10),
            ([5, 2, 9], [7, 3]),
            {},
            [22, 8, 10, 36],
            [(0, 29, 3), (3, 12, 1)],
            id="the first and the last page take only the rows in range",
        ),
        pytest.param(
            (1, 1, 1, 4, 1),
            (2, 2, 1, 4, 1),
            (0, 16),
            ([0, 1, 2, 3], [7, 8]),
            {},
            [0, 2, 4, 6, 8, 10, 12, 14],
            [(0, 28, 8)],
            id="neighbouring pages are one write",
        ),
        pytest.param(
            (1, 1, 1, 2, 2),
            (1, 1, 1, 2, 2),
            (0, 2),
            ([5], [7]),
            {"heads": ((0, 1), (0, 1))},
            [20, 21, 22, 23],
            [(0, 28, 4)],
            id="head-major: head by head",
        ),
        pytest.param(
            (1, 1, 1, 2, 2),
            (1, 1, 1, 2, 2),
            (1, 2),
            ([5], [7]),
            {"heads": ((0, 1), (0, 1))},
            [21, 23],
            [(0, 29, 1), (1, 31, 1)],
            id="head-major: a partial page is one write per head",
        ),
        pytest.param(
            (1, 1, 1, 2, 2),
            (1, 1, 1, 2, 2),
            (1, 2),
            ([5], [7]),
            {"heads": ((0, 1), (0, 1)), "physical": TOKEN_MAJOR},
            [22, 23],
            [(0, 30, 2)],
            id="token-major: a partial page is one write for all heads",
        ),
        pytest.param(
            (2, 2, 1, 4, 1),
            (1, 1, 1, 4, 1),
            (0, 8),
            ([5], [7, 9]),
            {},
            [20, 21, 22, 23],
            [(0, 28, 1), (1, 30, 1), (2, 36, 1), (3, 38, 1)],
            id="one of two prefill shards: right, though in pieces",
        ),
        pytest.param(
            (1, 1, 1, 4, 1), (2, 2, 4, 4, 1), (0, 4), ([5], [7]), {"shards": (0, 1)}, [], [], id="nothing to move"
        ),
    ],
)
def test_images_by_hand(prefill, decode, span, tables, options, units, descriptors):
    image = _image(prefill, decode, span, tables, **options)
    assert image.unit_bytes == C
    assert image.units.tolist() == units
    assert _descriptors(image) == descriptors


@pytest.mark.parametrize(
    ("physical", "heads", "unit"),
    [
        pytest.param(HEAD_MAJOR, 2, 8, id="dense pages gather whole entries"),
        pytest.param(Physical(padding=4), 2, 4, id="padding halves the unit"),
        pytest.param(Physical(("layer", "block", "row", "head"), padding=3), 2, 1, id="odd padding: byte by byte"),
    ],
)
def test_the_gather_unit_divides_every_stride(physical, heads, unit):
    assert gather_unit_bytes(_pages(Sizes(1, 1, 1, 4, heads), physical=physical)[0]) == unit


def test_the_stride_of_a_single_head_does_not_shrink_the_gather_unit():
    assert gather_unit_bytes(replace(_pages(Sizes(1, 1, 1, 4, 1))[0], head_stride=7)) == 8


def _chunks(*, tokens=32, layers=3, staging_bytes=1000, max_descriptors=100, dst_table=(0, 2, 4, 6)):
    prefill, decode = Sizes(1, 1, 1, 4, 1), Sizes(2, 2, 1, 4, 1)
    runs = plan_runs(prefill.layout(), decode.layout(), 0, 0, 0, tokens)
    pages = list(zip(_pages(prefill, layers=layers), _pages(decode, layers=layers), strict=True))
    return list(
        pack_chunks(
            runs, range(8), dst_table, pages, [0], [0], staging_bytes=staging_bytes, max_descriptors=max_descriptors
        )
    )


def _layers(chunks):
    return [[(gather.layer, len(gather.units)) for gather in chunk.gathers] for chunk in chunks]


# A layer's image has 16 entries of 8 bytes in 4 descriptors (its pages are not neighbours).
@pytest.mark.parametrize(
    ("options", "layers", "descriptors"),
    [
        pytest.param({}, [[(0, 16), (1, 16), (2, 16)]], [12], id="all layers in one chunk"),
        pytest.param(
            {"staging_bytes": 300}, [[(0, 16), (1, 16)], [(2, 16)]], [8, 4], id="a layer that doesn't fit waits whole"
        ),
        pytest.param(
            {"max_descriptors": 9}, [[(0, 16), (1, 16)], [(2, 16)]], [8, 4], id="the descriptor limit closes a chunk"
        ),
        pytest.param(
            {"staging_bytes": 100, "layers": 1},
            [[(0, 12)], [(0, 4)]],
            [3, 1],
            id="a layer larger than the buffer is cut at a page",
        ),
        pytest.param(
            {"max_descriptors": 3, "layers": 1}, [[(0, 12)], [(0, 4)]], [3, 1], id="more pages than descriptors"
        ),
        pytest.param(
            {"staging_bytes": 100, "layers": 2},
            [[(0, 12)], [(0, 4), (1, 8)], [(1, 8)]],
            [3, 3, 2],
            id="the next large layer fills what is left",
        ),
        pytest.param(
            {"staging_bytes": 20, "layers": 1},
            [[(0, 2)]] * 8,
            [1] * 8,
            id="a page larger than the buffer is cut between entries",
        ),
        pytest.param({"tokens": 0}, [], [], id="nothing to move is no chunk"),
    ],
)
def test_chunks_stay_within_both_bounds(options, layers, descriptors):
    chunks = _chunks(**options)
    assert _layers(chunks) == layers
    assert [len(chunk.length) for chunk in chunks] == descriptors
    for chunk in chunks:
        assert chunk.num_bytes == chunk.length.sum() == sum(len(gather.units) * C for gather in chunk.gathers)
        assert chunk.num_bytes <= options.get("staging_bytes", 1000)


def test_layers_of_equal_shape_share_their_indices():
    (chunk,) = _chunks()
    assert len({id(gather.units) for gather in chunk.gathers}) == 1


@pytest.mark.parametrize("limits", [{"staging_bytes": 7}, {"max_descriptors": 0}])
def test_a_buffer_smaller_than_an_entry_is_refused(limits):
    with pytest.raises(BindError, match="can't hold one entry of 8 bytes"):
        _chunks(**limits)
