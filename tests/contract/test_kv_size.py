"""`dcpctl plan` reckons KV cache as vLLM does: both are asked about the models of the catalogue."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dcp_operator.catalogue import ModelFacts, builtin
from dcp_operator.kv_size import KvSize, bytes_per_token
from dcp_operator.rules.geometry import context_choices, tensor_fits_heads
from devcluster.engine.environment import ensure_engine_environment
from devcluster.paths import this_cache

SCRIPT = Path(__file__).with_name("vllm_kv_size.py")
MODELS = [model for model in builtin().models if model.layout == "full"]
#: Block size, bytes of an element, memory of a rank, length of a sequence: odd ones, so that roundings show.
ENGINES = [(64, 2, 40 * 2**30 + 12345, 131072), (16, 1, 3 * 10**9 + 7, 10001), (128, 2, 17 * 10**9, 777)]


def cases() -> list[tuple[ModelFacts, int, int, tuple[int, int, int, int]]]:
    return [
        (model, tensor, context, engine)
        for model in MODELS
        for tensor in (1, 2, 4, 8, 16)
        if tensor_fits_heads(tensor, model.geometry)
        for context in context_choices(tensor, model.geometry)
        for engine in ENGINES
    ]


def question(model: ModelFacts, tensor: int, context: int, engine: tuple[int, int, int, int]) -> dict:
    """One engine in vLLM's words; heads per rank are what its ModelConfig.get_num_kv_heads returns."""
    block, element_bytes, available, length = engine
    latent = model.attention == "mla"
    return {
        "mla": latent,
        "layers": model.layers,
        "heads": 1 if latent else max(1, model.kv_heads // tensor),
        "size": (model.kv_lora_rank or 0) + (model.qk_rope_head_dim or 0) if latent else model.head_size,
        "block": block,
        "decode_context": context,
        "element_bytes": element_bytes,
        "available": available,
        "length": length,
    }


@pytest.fixture(scope="module")
def reckoned_by_vllm() -> list[dict]:
    python = ensure_engine_environment(this_cache().root, lambda message: None) / "bin" / "python3"
    result = subprocess.run(
        [str(python), str(SCRIPT)],
        input=json.dumps([question(*case) for case in cases()]),
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_pages_blocks_and_requests_are_vllms(reckoned_by_vllm: list[dict]):
    asked = cases()
    assert len(asked) == len(reckoned_by_vllm) > 300
    assert {model.attention for model, *_ in asked} == {"mla", "gqa"}
    assert {context for _, _, context, _ in asked} >= {1, 2, 4, 8, 16}
    for (model, tensor, context, engine), vllm in zip(asked, reckoned_by_vllm, strict=True):
        block, element_bytes, available, length = engine
        per_token = bytes_per_token(model, tensor, element_bytes)
        ours = KvSize(per_token, block, context, available)
        assert {
            "page_bytes": per_token * block,
            "blocks": ours.blocks,
            "request_blocks": ours.blocks_for(length),
            "requests": pytest.approx(ours.requests(length)),
        } == vllm, (model.names[0], tensor, context, engine)
