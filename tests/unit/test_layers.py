"""Registered layers as page sets: keys and values together or apart, and memory that layers share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcp_connector.errors import StartupError
from dcp_connector.layers import flatten, read_layers, with_halves
from dcp_connector.page_sets import askable, halves, offered
from dcp_connector.tensors import storages
from dcp_connector.wire import Page
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import ArrayTensor

SIDE = Sizes(1, 1, 16, 16, 2).layout()
ONE_HEAD = Sizes(1, 1, 16, 16, 1).layout()
MEMORY = np.zeros(1 << 16, dtype=np.uint8)
#: Sizes of the dimensions by letter: blocks, heads, rows, bytes of a key or of a value, key and value.
NUM_BLOCKS = 4
COUNTS = {"b": NUM_BLOCKS, "h": 2, "n": 16, "c": 8, "2": 2}


def tensor(logical: str, physical: str, offset: int = 0, **counts: int) -> ArrayTensor:
    """A tensor with dimensions in the order `logical` that lie in memory in the order `physical`, outermost first."""
    sizes, strides, step = {**COUNTS, **counts}, {}, 1
    for dimension in reversed(physical):
        strides[dimension] = step
        step *= sizes[dimension]
    return ArrayTensor(MEMORY, offset, tuple(sizes[each] for each in logical), tuple(strides[each] for each in logical))


@pytest.mark.parametrize("physical", ["2bhnc", "b2hnc", "bh2nc", "bhn2c", "2bnhc", "bnh2c", "hb2nc"])
@pytest.mark.parametrize("logical", ["2bhnc", "2bnhc", "b2hnc", "b2nhc"])
def test_a_dimension_of_keys_and_values_makes_two_page_sets_in_any_order_of_memory(logical: str, physical: str) -> None:
    view = tensor(logical, physical, offset=64)
    keys, values = read_layers({"layer": view}, SIDE, NUM_BLOCKS)
    stride = dict(zip(logical, view.stride(), strict=True))
    assert (keys.name, values.name) == ("layer/k", "layer/v")
    assert keys.page.base == view.data_ptr()
    assert values.page.base == view.data_ptr() + stride["2"]
    for page in (keys.page, values.page):
        assert (page.num_blocks, page.num_heads, page.kernel_block_size, page.entry_bytes) == (NUM_BLOCKS, 2, 16, 8)
        assert (page.block_stride, page.head_stride, page.row_stride) == (stride["b"], stride["h"], stride["n"])


@pytest.mark.parametrize("logical", ["2bnc", "b2nc"])
def test_one_head_needs_no_dimension_for_it_beside_keys_and_values(logical: str) -> None:
    keys, values = read_layers({"layer": tensor(logical, "b2nc")}, ONE_HEAD, NUM_BLOCKS)
    assert values.page.base - keys.page.base == 16 * 8
    assert keys.page.block_stride == values.page.block_stride == 2 * 16 * 8


def test_a_tensor_for_keys_and_one_for_values_are_two_page_sets() -> None:
    pair = tensor("bhnc", "bhnc"), tensor("bhnc", "bnhc", offset=8192)
    keys, values = read_layers({"layer": pair}, SIDE, NUM_BLOCKS)
    assert (keys.name, values.name) == ("layer/k", "layer/v")
    assert (keys.page.row_stride, values.page.row_stride) == (8, 16)
    assert set(flatten({"layer": pair})) == {"layer/k", "layer/v"}


def test_kernel_blocks_of_keys_and_values_are_read_from_the_shape() -> None:
    for layer in read_layers({"layer": tensor("2bnhc", "2bnhc", b=8, n=8)}, SIDE, NUM_BLOCKS):
        assert (layer.page.num_blocks, layer.page.kernel_block_size) == (8, 8)


def test_two_heads_are_not_taken_for_keys_and_values() -> None:
    (layer,) = read_layers({"layer": tensor("bhnc", "bhnc")}, SIDE, NUM_BLOCKS)
    assert (layer.name, layer.page.num_heads) == ("layer", 2)


def test_a_tensor_that_can_be_read_in_two_ways_is_refused() -> None:
    square = Sizes(1, 1, 2, 2, 2).layout()
    with pytest.raises(StartupError, match="in 2 ways as keys and values of 4 blocks of 2 heads and 2 rows"):
        read_layers({"layer": tensor("2bnhc", "2bnhc", n=2)}, square, NUM_BLOCKS)


@pytest.mark.parametrize(
    ("registered", "words"),
    [
        (tensor("2bhnc", "2bhnc", h=3), "which this connector doesn't understand: expected [blocks, heads, rows"),
        ((tensor("bhnc", "bhnc"),) * 3, "layer has 3 KV tensors; this connector knows one, or one of keys and one"),
    ],
)
def test_what_is_not_understood_is_refused_in_words(registered: Any, words: str) -> None:
    with pytest.raises(StartupError) as error:
        read_layers({"layer": registered}, SIDE, NUM_BLOCKS)
    assert words in str(error.value)


def test_a_layer_that_reuses_another_layers_cache_is_moved_once() -> None:
    mine, shared = tensor("bhnc", "bhnc"), tensor("bhnc", "bhnc", offset=4096)
    layers = read_layers({"a": mine, "b": shared, "reuses a": mine}, SIDE, NUM_BLOCKS)
    assert [layer.name for layer in layers] == ["a", "b"]


def test_allocations_that_overlap_are_registered_as_one() -> None:
    first, base = MEMORY[:4096], int(MEMORY.ctypes.data)
    allocations = {"a": first, "within a": MEMORY[64:128], "over a": MEMORY[:8192], "far": MEMORY[9000:]}
    tensors = {name: ArrayTensor(memory, 0, (1,), (1,)) for name, memory in allocations.items()}
    assert storages(tensors) == ((base, 8192), (base + 9000, len(MEMORY) - 9000))


def test_packed_entries_can_be_asked_for_as_keys_and_values() -> None:
    (packed,) = read_layers({"layer": tensor("bhnc", "bnhc")}, SIDE, NUM_BLOCKS)
    whole, keys, values = with_halves((packed,), 3)
    assert [whole.name, keys.name, values.name] == ["layer", "layer/k", "layer/v"]
    assert (keys.page.base, keys.page.entry_bytes) == (packed.page.base, 3)
    assert (values.page.base, values.page.entry_bytes) == (packed.page.base + 3, 5)
    assert keys.page.row_stride == packed.page.row_stride


@pytest.mark.parametrize("key_bytes", [0, 8, 9])
def test_an_entry_that_is_not_key_and_value_is_not_cut(key_bytes: int) -> None:
    (packed,) = read_layers({"layer": tensor("bhnc", "bhnc")}, SIDE, NUM_BLOCKS)
    assert with_halves((packed,), key_bytes) == (packed,)


def page(entry_bytes: int = 8, base: int = 0) -> Page:
    return Page(base, 8, 16, 512, 512, 32, entry_bytes)


def test_a_side_asks_in_the_pieces_that_the_peer_has() -> None:
    packed, apart = {"a": page()}, {"a/k": page(4), "a/v": page(4, 4096)}
    assert askable(packed, packed, 4) == packed
    assert askable(packed, apart, 4) == {"a/k": page(4), "a/v": page(4, 4)}
    assert askable(apart, packed, 0) == apart
    assert offered(packed, 4).keys() == {"a", "a/k", "a/v"}
    assert offered(packed, 0) == packed
    assert askable(packed, apart, 0) == packed
    assert halves("a/k", page(), 4) == {}
