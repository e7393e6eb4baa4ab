"""The engine's test plugin: what it computes must not depend on how tokens are spread over ranks.

These tests are about the reference, not about the product. They make two statements of the connector's own end-to-end
tests mean something: "same tokens as one plain engine", and "other tokens when shards are swapped".
"""

import pytest

from tests.support.engines import EnginePool, EngineSpec
from tests.support.prompts import edge_prompts

PLAIN = EngineSpec()
# VLLM_PLUGINS names the plugins that vLLM may load; an empty name allows none.
STOCK = EngineSpec(env=(("VLLM_PLUGINS", ""),))
SPLIT = EngineSpec(tensor=2, dcp=2, interleave=8)
SWAPPED = EngineSpec(tensor=2, dcp=2, interleave=8, env=(("DCP_TEST_SWAP_SHARDS", "1"),))

PROMPTS = edge_prompts(block=32, dcp=2, interleave=8)


def test_one_rank_gives_the_tokens_of_stock_vllm(engine_pool: EnginePool) -> None:
    assert engine_pool.answers(PLAIN, PROMPTS) == engine_pool.answers(STOCK, PROMPTS)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(SPLIT, id="two ranks with interleave 8"),
        pytest.param(EngineSpec(tensor=2, dcp=2, interleave=1), id="two ranks token by token"),
        pytest.param(EngineSpec(tensor=2, dcp=2, interleave=32), id="two ranks block by block"),
        pytest.param(SWAPPED, id="two ranks that exchanged their shards but compute their own KV"),
    ],
)
def test_spreading_tokens_over_ranks_changes_no_token(engine_pool: EnginePool, spec: EngineSpec) -> None:
    expected = engine_pool.answers(PLAIN, PROMPTS)
    assert engine_pool.answers(spec, PROMPTS) == expected
