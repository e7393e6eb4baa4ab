"""Which token of a request lives where: vLLM's placement formula for decode context parallelism.

With W ranks in a DCP group, interleave I and block size B, the token at position i of a request is

    block = i // (B * W)                    index into the request's block table
    o     = i %  (B * W)
    shard = (o // I) % W                    the rank of the DCP group that keeps it
    row   = (o // (W * I)) * I + o % I      its row in that rank's block

(vLLM 0.32, `v1/worker/block_table.py`, ComputeSlotMappingKernel.) The arithmetic is written for any array type, so
that tests can check it without torch. Nothing here imports the connector's own geometry: a reference that shares code
with what it checks would share its mistakes.
"""

import os
from dataclasses import dataclass
from typing import Any

SWAP_ENV = "DCP_TEST_SWAP_SHARDS"

__all__ = ["SWAP_ENV", "Shard", "shard_of_rank"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of the tokens of every request: number `index` of `world`."""

    world: int
    index: int
    interleave: int
    block_size: int

    def holds(self, positions: Any) -> Any:
        """Return, for an integer array of token positions, a boolean array: does this shard keep the token?"""
        return self._offset(positions) // self.interleave % self.world == self.index

    def block(self, positions: Any) -> Any:
        """Return the indices into the request's block table."""
        return positions // (self.block_size * self.world)

    def row(self, positions: Any) -> Any:
        """Return the rows within the blocks, of tokens that this shard holds."""
        offset = self._offset(positions)
        return offset // (self.world * self.interleave) * self.interleave + offset % self.interleave

    def _offset(self, positions: Any) -> Any:
        return positions % (self.block_size * self.world)


def shard_of_rank(rank: int, world: int) -> int:
    """Return the shard that a rank of the DCP group plays: its own number, or its mirror image in the negative control.

    With DCP_TEST_SWAP_SHARDS=1 rank c writes and reads as shard W-1-c. That is only a renaming: an engine that computes
    its own KV gives the same tokens as before. KV that comes from a peer, though, was laid out for shard c, and is
    now read as that of another shard. Attention does not depend on the order of rows (RoPE went into the keys before
    they were stored), so what changes is the *number* of rows: where the shards of what arrived differ in length, one
    rank ignores rows that arrived and another reads rows that nobody wrote. Shards of equal length hide the swap,
    which is why the comparison needs prompts off the multiples of W * interleave.
    """
    return world - 1 - rank if os.environ.get(SWAP_ENV) == "1" else rank
