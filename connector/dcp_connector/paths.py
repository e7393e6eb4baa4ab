"""Which path one pair of ranks takes: descriptors straight from page to page, or packed through staging memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from dcp_connector.bind import bind
from dcp_connector.geometry import PageLayout, SideLayout
from dcp_connector.mapping import period, plan_runs
from dcp_connector.packing import plan_image
from dcp_connector.units import KIB, IntArray, LocalHead

__all__ = ["DIRECT_MIN_FRAGMENT_BYTES", "Fragments", "Path", "PathChoice", "Transport", "choose_path", "mean_fragments"]

Path: TypeAlias = Literal["direct", "pack"]
PathChoice: TypeAlias = Literal["auto", "direct", "pack"]
Transport: TypeAlias = Literal["tcp", "rdma"]

#: Below this mean fragment a descriptor costs more than gathering its bytes. Over TCP a TransferEngine reached 0.46 of
#: its large-write rate with 64 KiB descriptors and 0.1 with 8 KiB; RDMA is expected to turn at 4 to 16 KiB.
DIRECT_MIN_FRAGMENT_BYTES: dict[Transport, int] = {"tcp": 64 * KIB, "rdma": 8 * KIB}

#: Gathering reads and writes the bytes once more; it has to make the fragments at least this much larger to pay.
_PACK_MIN_GAIN = 2.0

#: Tokens that a mean is taken over when the layouts' common period is longer.
_MAX_SAMPLE_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Fragments:
    """Mean bytes per descriptor on either path; 0.0 when the pair shares no token."""

    direct_bytes: float
    packed_bytes: float


def choose_path(fragments: Fragments, transport: Transport, override: PathChoice = "auto") -> Path:
    """Choose the path of one (prefill rank, decode rank) pair. An override other than "auto" always wins."""
    if override != "auto":
        return override
    large_enough = fragments.direct_bytes >= DIRECT_MIN_FRAGMENT_BYTES[transport]
    no_gain = fragments.packed_bytes < _PACK_MIN_GAIN * fragments.direct_bytes
    return "direct" if large_enough or no_gain or not fragments.direct_bytes else "pack"


@lru_cache(maxsize=1024)
def mean_fragments(
    prefill: SideLayout,
    decode: SideLayout,
    prefill_shard: int,
    decode_shard: int,
    src_page: PageLayout,
    dst_page: PageLayout,
    src_heads: tuple[LocalHead, ...],
    dst_heads: tuple[LocalHead, ...],
) -> Fragments:
    """Return what one layer's descriptors would be over one period, with blocks that are never neighbours in memory.

    A request's real blocks may be neighbours and give larger fragments on either path; the choice is made once per
    peer, so it must not depend on them.
    """
    tokens = min(period(prefill, decode), _MAX_SAMPLE_TOKENS)
    runs = plan_runs(prefill, decode, prefill_shard, decode_shard, 0, tokens)
    if not len(runs):
        return Fragments(0.0, 0.0)
    src_table = _scattered_table(src_page, prefill.num_blocks(tokens))
    dst_table = _scattered_table(dst_page, decode.num_blocks(tokens))
    copies = bind(runs, src_table, dst_table, src_page, dst_page, src_heads, dst_heads)
    image = plan_image(runs, src_table, dst_table, src_page, dst_page, src_heads, dst_heads)
    return Fragments(copies.total_bytes / len(copies), image.num_bytes / len(image.length))


def _scattered_table(page: PageLayout, num_blocks: int) -> IntArray:
    """Return block ids 0, 2, 0, 2, ...: no block is followed by its neighbour, however few blocks the page has."""
    limit = page.num_blocks // page.kernel_blocks_per_block
    return np.arange(num_blocks, dtype=np.int64) % 2 * min(2, limit - 1)
