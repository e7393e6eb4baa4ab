"""Which path one pair of ranks takes: from page to page, or through staging memory of one side or of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from dcp_connector.bind import bind
from dcp_connector.geometry import PageLayout, SideLayout
from dcp_connector.mapping import period, plan_runs
from dcp_connector.packing import plan_image
from dcp_connector.units import KIB, MIB, IntArray, LocalHead

__all__ = [
    "CHUNK_BYTES",
    "DIRECT_MIN_FRAGMENT_BYTES",
    "PACK_MIN_FRAGMENT_BYTES",
    "Fragments",
    "Path",
    "PathChoice",
    "Transport",
    "choose_path",
    "landing_slots",
    "mean_fragments",
]

Path: TypeAlias = Literal["direct", "pack", "scatter"]
PathChoice: TypeAlias = Literal["auto", "direct", "pack", "scatter"]
Transport: TypeAlias = Literal["tcp", "rdma"]

#: Below this mean fragment a descriptor costs more than gathering its bytes. Over TCP a TransferEngine reached 0.46 of
#: its large-write rate with 64 KiB descriptors and 0.1 with 8 KiB; RDMA is expected to turn at 4 to 16 KiB.
DIRECT_MIN_FRAGMENT_BYTES: dict[Transport, int] = {"tcp": 64 * KIB, "rdma": 8 * KIB}

#: Below this mean fragment even a gathered page isn't worth a descriptor: rows travel in large chunks instead, and
#: decode puts them into their pages.
PACK_MIN_FRAGMENT_BYTES: dict[Transport, int] = {"tcp": 64 * KIB, "rdma": 8 * KIB}

#: Bytes that are gathered, written and scattered in one go. Large enough for the transport's full rate, small enough
#: that gathering the next chunk overlaps with writing this one.
CHUNK_BYTES: dict[Transport, int] = {"tcp": 8 * MIB, "rdma": 16 * MIB}

#: Slots that decode's staging memory is cut into at least.
_MIN_SLOTS = 4

#: Gathering reads and writes the bytes once more; it has to make the fragments at least this much larger to pay.
_PACK_MIN_GAIN = 2.0

#: Tokens that a mean is taken over when the layouts' common period is longer.
_MAX_SAMPLE_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Fragments:
    """Mean bytes per descriptor on either path; 0.0 when the pair shares no token."""

    direct_bytes: float
    packed_bytes: float


def choose_path(
    fragments: Fragments, transport: Transport, override: PathChoice = "auto", *, can_scatter: bool = True
) -> Path:
    """Choose the path of one (prefill rank, decode rank) pair.

    An override other than "auto" wins, except "scatter" where `can_scatter` says that decode has no staging memory.
    """
    if override in ("direct", "pack"):
        return override
    if override == "scatter" and can_scatter:
        return "scatter"
    if fragments.direct_bytes >= DIRECT_MIN_FRAGMENT_BYTES[transport] or not fragments.direct_bytes:
        return "direct"
    gains = fragments.packed_bytes >= _PACK_MIN_GAIN * fragments.direct_bytes
    if gains and fragments.packed_bytes >= PACK_MIN_FRAGMENT_BYTES[transport]:
        return "pack"
    if can_scatter:
        return "scatter"
    return "pack" if gains else "direct"


def landing_slots(staging_bytes: int, transport: Transport) -> tuple[int, int]:
    """Return (bytes of a slot, number of slots) of decode's staging memory: at least four slots, a chunk each."""
    slot_bytes = min(CHUNK_BYTES[transport], staging_bytes // _MIN_SLOTS)
    return slot_bytes, staging_bytes // slot_bytes


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
