"""Blocks that a writer may still write into, kept out of use although their request has ended.

vLLM gives a connector its pool of blocks (`bind_gpu_block_pool`, "to inc/dec ref counts"). One reference of ours on a
block keeps it off the list of free blocks whatever becomes of the request, so nobody waits for the writer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


class BlockPool(Protocol):
    """vLLM's BlockPool (v1/core/block_pool.py), as far as it is used. `blocks[i]` is the block with id i."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to each block."""
        ...

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        """Take a reference off each block; those without any are free."""
        ...


@dataclass(slots=True)
class _Kept:
    blocks: tuple[Any, ...]
    num_ranks: int


class Quarantine:
    """The kept blocks of all requests. Engine core's thread only."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._kept: dict[str, _Kept] = {}

    def bind(self, pool: BlockPool) -> None:
        """Take the pool that all blocks belong to."""
        self._pool = pool

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept out of use."""
        return sum(len(kept.blocks) for kept in self._kept.values())

    def put(self, request_id: str, block_ids: Sequence[int], num_ranks: int) -> None:
        """Keep a request's blocks until `num_ranks` more ranks have cleared them. The request still holds them now."""
        if self._pool is None:
            logger.error(
                "dcp: this vLLM gave the connector no block pool: a late write into request %s can't be kept "
                "from blocks that are used again",
                request_id,
            )
            return
        kept = self._kept.get(request_id)
        if kept is None:
            # 0 is vLLM's null block: it stands for no block.
            kept = self._kept[request_id] = _Kept(tuple(self._pool.blocks[block] for block in block_ids if block), 0)
            self._pool.touch(kept.blocks)
        kept.num_ranks += num_ranks

    def clear(self, request_id: str, num_ranks: int) -> None:
        """So many ranks have cleared a request's blocks; the last one gives them back. Unknown requests are ignored."""
        kept = self._kept.get(request_id)
        if kept is None or self._pool is None:
            return
        kept.num_ranks -= num_ranks
        if kept.num_ranks <= 0:
            del self._kept[request_id]
            self._pool.free_blocks(kept.blocks)
