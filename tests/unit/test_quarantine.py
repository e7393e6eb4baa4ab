"""Blocks that a writer may still write into stay out of vLLM's pool, however their request ends."""

from __future__ import annotations

import logging

import pytest

from dcp_connector.quarantine import Quarantine
from tests.support.block_pool import BlockPool


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8, references=1)


@pytest.fixture
def quarantine(pool: BlockPool) -> Quarantine:
    made = Quarantine()
    made.bind(pool)
    return made


def test_blocks_are_free_when_their_request_and_the_last_rank_are_done_with_them(
    quarantine: Quarantine, pool: BlockPool
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


def test_a_second_rank_that_joins_later_keeps_the_blocks_too(quarantine: Quarantine, pool: BlockPool) -> None:
    quarantine.put("request", (3,), 1)
    quarantine.put("request", (3,), 1)
    quarantine.clear("request", 1)
    pool.free_blocks([pool.blocks[3]])
    assert pool.free() == []
    quarantine.clear("request", 1)
    assert pool.free() == [3]


def test_blocks_that_are_clear_before_the_request_has_ended_stay_the_requests(
    quarantine: Quarantine, pool: BlockPool
) -> None:
    quarantine.put("request", (3,), 1)
    quarantine.clear("request", 1)
    assert pool.free() == []
    assert pool.blocks[3].references == 1


def test_the_null_block_is_left_alone_and_unknown_requests_are_ignored(quarantine: Quarantine, pool: BlockPool) -> None:
    quarantine.put("request", (0, 3), 1)
    quarantine.clear("another", 1)
    assert [block.references for block in pool.blocks[:4]] == [1, 1, 1, 2]


def test_a_vllm_that_gives_no_pool_is_reported_and_not_a_crash(caplog: pytest.LogCaptureFixture) -> None:
    without = Quarantine()
    with caplog.at_level(logging.ERROR, "dcp_connector"):
        without.put("request", (3,), 1)
    assert "no block pool" in caplog.text
    without.clear("request", 1)
