"""The engine's test plugin: what it computes must not depend on how tokens are spread over ranks.

These tests are about the reference, not about the product. They give a meaning to two statements of the tests of the
connector: "the same tokens as one plain engine", and "other tokens when the shards are swapped".
"""

import pytest

from devcluster.completions import complete_all, get_text
from devcluster.metrics import total
from tests.support.engines import EnginePool, EngineSpec
from tests.support.prompts import edge_prompts

PLAIN = EngineSpec()
# VLLM_PLUGINS names the plugins that vLLM may load; an empty name allows none.
STOCK = EngineSpec(env=(("VLLM_PLUGINS", ""),))
SPLIT = EngineSpec(tensor=2, dcp=2, interleave=8)
TOKEN_BY_TOKEN = EngineSpec(tensor=2, dcp=2, interleave=1)
BLOCK_BY_BLOCK = EngineSpec(tensor=2, dcp=2, interleave=32)
SWAPPED = EngineSpec(tensor=2, dcp=2, interleave=8, env=(("DCP_TEST_SWAP_SHARDS", "1"),))

# Engines start side by side, and two may live.
PAIRS = ((PLAIN, STOCK), (SPLIT, SWAPPED), (TOKEN_BY_TOKEN, BLOCK_BY_BLOCK))
# Every second one: all lengths around the edges are for the connector's tests.
PROMPTS = edge_prompts(block=32, dcp=2, interleave=8)[::2]

pytestmark = pytest.mark.timeout(900)  # a start takes 20 s, and some minutes on a machine that is busy otherwise


def tokens_of(pool: EnginePool, spec: EngineSpec) -> list[tuple[int, ...]]:
    pool.get(*next(pair for pair in PAIRS if spec in pair))
    return pool.answers(spec, PROMPTS)


@pytest.fixture(scope="module")
def expected(engine_pool: EnginePool) -> list[tuple[int, ...]]:
    return tokens_of(engine_pool, PLAIN)


def test_one_rank_gives_the_tokens_of_stock_vllm(engine_pool: EnginePool, expected: list[tuple[int, ...]]) -> None:
    assert expected == tokens_of(engine_pool, STOCK)


def test_the_model_does_not_say_the_same_whatever_it_is_asked(expected: list[tuple[int, ...]]) -> None:
    assert len(set(expected)) == len(set(PROMPTS)), "two prompts had the same answer"
    assert min(len(set(tokens)) for tokens in expected) >= 4, "an answer repeats one or two tokens"


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(SPLIT, id="two ranks, eight tokens at a time"),
        pytest.param(SWAPPED, id="two ranks that exchanged their shards and compute their own KV"),
        pytest.param(TOKEN_BY_TOKEN, id="two ranks, token by token"),
        pytest.param(BLOCK_BY_BLOCK, id="two ranks, block by block"),
    ],
)
def test_spreading_tokens_over_ranks_changes_no_token(
    engine_pool: EnginePool, expected: list[tuple[int, ...]], spec: EngineSpec
) -> None:
    assert tokens_of(engine_pool, spec) == expected


def test_prefix_caching_changes_no_token(engine_pool: EnginePool, expected: list[tuple[int, ...]]) -> None:
    """The block-by-block engine has just answered these prompts: now it finds their blocks in its cache."""
    before = tokens_of(engine_pool, BLOCK_BY_BLOCK)
    (engine,) = engine_pool.get(BLOCK_BY_BLOCK)
    again = complete_all(engine.url, PROMPTS, concurrency=4)
    assert [completion.token_ids for completion in again] == before == expected
    assert total(get_text(engine.url, "/metrics"), "vllm:prefix_cache_hits_total") > 0
