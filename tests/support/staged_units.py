"""Sixteen units of eight bytes, and some of them in an order of their own: what tests of staging memory move."""

import numpy as np

from dcp_connector.geometry import PageLayout

UNITS = np.array([9, 0, 5], dtype=np.int64)


def a_page(memory: np.ndarray, offset: int = 0) -> PageLayout:
    """16 units of 8 bytes."""
    return PageLayout(
        base=int(memory.ctypes.data) + offset,
        num_blocks=4,
        kernel_block_size=4,
        block_size=4,
        num_heads=1,
        block_stride=32,
        head_stride=32,
        row_stride=8,
        entry_bytes=8,
    )
