"""Runs where vLLM is installed: asks its KV-cache sizing about engines, one JSON document on stdin, one on stdout.

Never imported by a test: `test_kv_size.py` starts it with the engine environment's Python. Each case is an engine
{mla, layers, heads, size, block, decode_context, element_bytes, available, length}: `heads` are those of one rank.
"""

import json
import sys
from functools import cache
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def size(case: dict) -> dict:
    """Return what vLLM makes of an engine: bytes of a page, blocks, blocks of a request, and how many requests fit."""
    config = engine_config(case)
    kind = MLAAttentionSpec if case["mla"] else FullAttentionSpec
    spec = kind(
        block_size=case["block"],
        num_kv_heads=case["heads"],
        head_size=case["size"],
        dtype=DTYPES[case["element_bytes"]],
    )
    groups = get_kv_cache_groups(config, {f"layer.{number}": spec for number in range(case["layers"])})
    found = get_kv_cache_config_from_groups(config, groups, case["available"])
    return {
        "page_bytes": spec.page_size_bytes * case["layers"],
        "blocks": found.num_blocks,
        "request_blocks": spec.max_memory_usage_bytes(config) // spec.page_size_bytes,
        "requests": get_max_concurrency_for_kv_cache_config(config, found),
    }


def engine_config(case: dict) -> SimpleNamespace:
    """Return the parts of a VllmConfig that sizing reads: a whole one needs a model's files."""
    whole = plain_config()
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case["length"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=case["decode_context"]),
        cache_config=whole.cache_config,
        scheduler_config=whole.scheduler_config,
        attention_config=whole.attention_config,
        kv_transfer_config=None,
        speculative_config=None,
    )


@cache
def plain_config() -> VllmConfig:
    """Return vLLM's default configuration, without a model, in the layout that engines resolve it to."""
    whole = VllmConfig()
    whole.cache_config.kv_cache_layout = "LBNHC"
    return whole


if __name__ == "__main__":
    print(json.dumps([size(case) for case in json.load(sys.stdin)]))
