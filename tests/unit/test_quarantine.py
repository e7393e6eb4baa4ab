"""Blocks that a writer may still write into stay out of vLLM's pool, however their request ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from dcp_connector.quarantine import Quarantine


@dataclass(eq=False)
class Block:
    """A block as vLLM's pool counts it."""

    number: int
    references: int = 1


@dataclass
class Pool:
    """vLLM's rule: a block without references is free."""

    blocks: list[Block] = field(default_factory=lambda: [Block(number) for number in range(8)])

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.references += 1

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        for block in ordered_blocks:
            block.references -= 1
            assert block.references >= 0, "freed twice"

    def free(self) -> list[int]:
        return [block.number for block in self.blocks if not block.references]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def quarantine(pool: Pool) -> Quarantine:
    made = Quarantine()
    made.bind(pool)
    return made


def test_blocks_are_free_when_their_request_and_the_last_rank_are_done_with_them(
    quarantine: Quarantine, pool: Pool
) -> None:
    quarantine.put("request", (3, 5), 2)
    pool.free_blocks([pool.blocks[3], pool.blocks[5]])
    assert pool.free() == []
    quarantine.clear("request", 1)
    assert pool.free() == []
    assert quarantine.num_blocks == 2
    quarantine.clear("request", 1)
    assert pool.free() == [3, 5]
    assert quarantine.num_blocks == 0


def test_a_second_rank_that_joins_later_keeps_the_blocks_too(quarantine: Quarantine, pool: Pool) -> None:
    quarantine.put("request", (3,), 1)
    quarantine.put("request", (3,), 1)
    quarantine.clear("request", 1)
    pool.free_blocks([pool.blocks[3]])
    assert pool.free() == []
    quarantine.clear("request", 1)
    assert pool.free() == [3]


def test_blocks_that_are_clear_before_the_request_has_ended_stay_the_requests(
    quarantine: Quarantine, pool: Pool
) -> None:
    quarantine.put("request", (3,), 1)
    quarantine.clear("request", 1)
    assert pool.free() == []
    assert pool.blocks[3].references == 1


def test_the_null_block_is_left_alone_and_unknown_requests_are_ignored(quarantine: Quarantine, pool: Pool) -> None:
    quarantine.put("request", (0, 3), 1)
    quarantine.clear("another", 1)
    assert [block.references for block in pool.blocks[:4]] == [1, 1, 1, 2]


def test_a_vllm_that_gives_no_pool_is_reported_and_not_a_crash(caplog: pytest.LogCaptureFixture) -> None:
    without = Quarantine()
    with caplog.at_level(logging.ERROR, "dcp_connector"):
        without.put("request", (3,), 1)
    assert "no block pool" in caplog.text
    without.clear("request", 1)
