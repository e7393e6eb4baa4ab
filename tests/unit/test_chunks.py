"""The scatter path's stream by hand. Whole transfers are in tests/property/test_mapping_bytes.py."""

from __future__ import annotations

import numpy as np
import pytest

from dcp_connector.chunks import Chunk, Part, locate_layers, plan_chunks, staged
from dcp_connector.pages import BindError
from tests.support.kv_oracle import HEAD_MAJOR, TOKEN_MAJOR, Rank, Sizes


def test_chunks_are_whole_rows_of_one_layer_after_the_other() -> None:
    assert plan_chunks(5, (10, 10), 30) == (
        Chunk((Part(0, 0, 3, 0),), 30),
        Chunk((Part(0, 3, 2, 0), Part(1, 0, 1, 20)), 30),
        Chunk((Part(1, 1, 3, 0),), 30),
        Chunk((Part(1, 4, 1, 0),), 10),
    )


def test_layers_may_have_rows_of_different_sizes() -> None:
    assert plan_chunks(2, (10, 16), 40) == (
        Chunk((Part(0, 0, 2, 0), Part(1, 0, 1, 20)), 36),
        Chunk((Part(1, 1, 1, 0),), 16),
    )


@pytest.mark.parametrize(("num_rows", "sizes"), [(0, (10,)), (3, ())], ids=["no rows", "no layers"])
def test_nothing_to_move_is_no_chunk(num_rows: int, sizes: tuple[int, ...]) -> None:
    assert plan_chunks(num_rows, sizes, 1) == ()


def test_a_slot_that_holds_no_row_is_refused() -> None:
    with pytest.raises(BindError, match="a staging slot of 15 bytes can't hold one row of 16 bytes"):
        plan_chunks(1, (10, 16), 15)


def entries(physical, heads, *, table=(3, 1), num_heads=2):
    """Two runs: rows 1 and 2 of the first block, row 0 of the second; entries of 8 bytes."""
    page = Rank(Sizes(1, 1, 4, 4, num_heads), 0, 0, 5, 1, 8, physical).pages[0]
    arrays = (np.array(values, dtype=np.int64) for values in ((0, 1), (1, 0), (2, 1)))
    return locate_layers("source", *arrays, table, [page], heads)[0]


def test_rows_are_found_head_by_head_where_heads_lie_apart() -> None:
    found = entries(HEAD_MAJOR, (0, 1))
    assert (found.unit_bytes, found.units_per_row) == (8, 2)
    # A block is 8 entries, a head's rows 4 of them.
    assert found.units.tolist() == [25, 29, 26, 30, 8, 12]


def test_rows_are_one_unit_where_their_heads_lie_together() -> None:
    found = entries(TOKEN_MAJOR, (0, 1))
    assert (found.unit_bytes, found.units_per_row, found.units.tolist()) == (16, 1, [13, 14, 4])


def test_a_part_of_the_heads_is_addressed_by_what_divides_their_place() -> None:
    found = entries(TOKEN_MAJOR, (1,))
    assert (found.unit_bytes, found.units.tolist()) == (8, [27, 29, 9])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": (2,)}, "source heads"),
        ({"heads": ()}, "source heads"),
        ({"heads": (0,), "table": (3, 5)}, "source block id 5 is outside the 5 blocks"),
        ({"heads": (0,), "table": (3,)}, "the source block table has 1 blocks"),
        ({"heads": (0,), "table": (3, -1)}, "source block id -1"),
    ],
)
def test_nothing_outside_the_page_is_addressed(options, words) -> None:
    with pytest.raises(BindError, match=words):
        entries(HEAD_MAJOR, **options)


def test_a_chunk_is_the_rows_of_its_parts_in_order() -> None:
    layer = entries(HEAD_MAJOR, (0, 1))
    first, second = staged(Chunk((Part(0, 1, 2, 0), Part(1, 0, 3, 32)), 80), [layer, layer])
    assert (first.layer, first.staging_offset, first.units.tolist()) == (0, 0, [26, 30, 8, 12])
    assert (second.layer, second.staging_offset) == (1, 32)
    assert second.units is layer.units
