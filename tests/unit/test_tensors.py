"""Registered tensors: their layout is read from shape and strides, and what isn't understood is refused."""

from __future__ import annotations

import numpy as np
import pytest

from dcp_connector.errors import StartupError
from dcp_connector.tensors import describe, storages
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import ArrayTensor

SIDE = Sizes(1, 1, 16, 16, 2).layout()
NUM_BLOCKS, HEADS, ROWS, ENTRY = 4, 2, 16, 8
PAGE_BYTES = HEADS * ROWS * ENTRY


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> ArrayTensor:
    return ArrayTensor(np.zeros(100_000, dtype=np.uint8), offset, shape, strides)


def head_major(offset: int = 0) -> ArrayTensor:
    return tensor((NUM_BLOCKS, HEADS, ROWS, ENTRY), (PAGE_BYTES, ROWS * ENTRY, ENTRY, 1), offset)


def test_head_major_pages() -> None:
    view = head_major(offset=64)
    page = describe("layer", view, SIDE, NUM_BLOCKS).page
    assert (page.base, page.num_blocks, page.kernel_block_size) == (view.data_ptr(), NUM_BLOCKS, ROWS)
    assert (page.block_stride, page.head_stride, page.row_stride, page.entry_bytes) == (PAGE_BYTES, 128, 8, 8)


def test_token_major_pages() -> None:
    page = describe("layer", tensor((4, 2, 16, 8), (256, 8, 16, 1)), SIDE, NUM_BLOCKS).page
    assert (page.head_stride, page.row_stride) == (8, 16)


def test_kernel_blocks_smaller_than_blocks() -> None:
    page = describe("layer", tensor((8, 2, 8, 8), (128, 64, 8, 1)), SIDE, NUM_BLOCKS).page
    assert (page.num_blocks, page.kernel_block_size, page.kernel_blocks_per_block) == (8, 8, 2)


def test_three_dimensions_are_one_head() -> None:
    one_head = Sizes(1, 1, 16, 16, 1).layout()
    page = describe("layer", tensor((4, 16, 8), (128, 8, 1)), one_head, NUM_BLOCKS).page
    assert (page.num_heads, page.row_stride) == (1, 8)


@pytest.mark.parametrize(
    ("shape", "strides", "words"),
    [
        ((2, 4, 2, 16, 8), (1024, 256, 128, 8, 1), "expected [blocks, heads, rows, bytes of an entry]"),
        ((4, 2, 16, 8), (256, 128, 1, 16), "an entry's elements are not contiguous"),
        ((4, 1, 16, 8), (128, 128, 8, 1), "expected 2 heads on this rank"),
        ((4, 2, 32, 8), (512, 256, 8, 1), "expected 4 blocks of 16 rows"),
        ((6, 2, 16, 8), (256, 128, 8, 1), "expected 4 blocks of 16 rows"),
        ((4, 2, 16, 8), (256, 64, 8, 1), "entries overlap"),
    ],
)
def test_what_is_not_understood_is_refused_in_words(
    shape: tuple[int, ...], strides: tuple[int, ...], words: str
) -> None:
    with pytest.raises(StartupError) as error:
        describe("layer", tensor(shape, strides), SIDE, NUM_BLOCKS)
    assert "layer" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_memory_of_hosts_and_gpus_is_described(device: str) -> None:
    view = head_major()
    view.device = device
    assert describe("layer", view, SIDE, NUM_BLOCKS).name == "layer"


@pytest.mark.parametrize("device", ["xpu:0", "meta", "npu"])
def test_memory_of_another_device_is_not_taken_for_the_hosts(device: str) -> None:
    view = head_major()
    view.device = device
    with pytest.raises(StartupError, match=f"the KV tensor of layer is on device {device}; .*cpu or cuda"):
        describe("layer", view, SIDE, NUM_BLOCKS)


def test_layers_that_share_an_allocation_are_registered_once() -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    shared = {name: ArrayTensor(memory, offset, (1,), (1,)) for name, offset in (("a", 0), ("b", 1024))}
    assert storages(shared) == ((int(memory.ctypes.data), 4096),)
