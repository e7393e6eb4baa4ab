"""vLLM's pool of KV blocks, as far as the connector's quarantine meets it: a block without references is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class Block:
    """A block as vLLM's pool counts it."""

    number: int
    references: int


class BlockPool:
    """Blocks 0 to `num_blocks` - 1, each with so many references at first."""

    def __init__(self, num_blocks: int, references: int) -> None:
        self.blocks = [Block(number, references) for number in range(num_blocks)]

    def free(self) -> list[int]:
        """Return the numbers of the free blocks."""
        return [block.number for block in self.blocks if not block.references]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.references += 1

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            block.references -= 1
            assert block.references >= 0, "a block was freed twice"
