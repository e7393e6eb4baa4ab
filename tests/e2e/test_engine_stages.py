"""Pipeline stages and data-parallel ranks in real engines: right tokens, from KV that really came from prefill."""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from devcluster.completions import complete, complete_serially, get_text
from devcluster.paths import CHECKOUT
from tests.support.engines import EnginePool, EngineSpec, RunningEngine
from tests.support.pd_pair import eventually, metric

pytestmark = pytest.mark.timeout(900)

PROMPTS = [("The quick brown fox jumps. " * 30)[:length] + str(length) for length in (1, 31, 62, 64, 200, 400)]


#: Two pipeline stages, with what they miss on CPU.
STAGES = ("--pipeline-parallel-size=2", "--worker-cls=tests.support.staged_worker.StagedWorker")


def spec(role: str, *args: str, **fields: Any) -> EngineSpec:
    path = (("PYTHONPATH", f"{CHECKOUT / 'connector'}:{CHECKOUT}"),)
    return EngineSpec(role=role, args=args, env=path, connector=(("request_timeout_s", 20.0),), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(
            spec("kv_producer", *STAGES),
            spec("kv_consumer", tensor=2, dcp=2, interleave=8),
            id="two stages to DCP 2",
        ),
        pytest.param(spec("kv_producer"), spec("kv_consumer", *STAGES), id="one rank to two stages"),
    ],
)
def test_pipeline_stages_exchange_their_layers(
    engine_pool: EnginePool, prefill: EngineSpec, decode: EngineSpec
) -> None:
    p, d = engine_pool.get(prefill, decode)
    for prompt in PROMPTS:
        assert complete_serially(p.url, d.url, prompt).token_ids == complete(p.url, prompt).token_ids, prompt[-5:]
    assert metric(d, "failed_transfers") == 0
    assert metric(p, "bytes_sent") == metric(d, "bytes_received") > 0
    eventually(lambda: metric(p, "pinned_requests", suffix="") == 0)
    engine_pool.stop(prefill, decode)


def test_each_data_parallel_rank_of_prefill_is_found_at_the_one_address_that_routers_know(
    engine_pool: EnginePool,
) -> None:
    prefill, decode = spec("kv_producer", data=2), spec("kv_consumer", tensor=2, dcp=2, interleave=8)
    p, d = engine_pool.get(prefill, decode)
    ranks = json.loads(get_text(str(p.bootstrap_url), "/query"))
    assert {number: entry["engine_id"].rpartition("_dp")[2] for number, entry in ranks.items()} == {"0": "0", "1": "1"}
    for prompt in PROMPTS:
        expected = complete(p.url, prompt).token_ids
        assert complete_serially(p.url, d.url, prompt).token_ids == expected
        for number, entry in ranks.items():
            fresh = f"{number}{prompt}"
            assert _concurrently(p, d, fresh, number, entry["engine_id"]) == complete(p.url, fresh).token_ids
    assert metric(d, "failed_transfers") == 0
    assert metric(d, "tokens_received") > 0
    eventually(lambda: metric(p, "pinned_requests", suffix="") == 0)
    engine_pool.stop(prefill, decode)


def _concurrently(p: RunningEngine, d: RunningEngine, prompt: str, rank: str, engine_id: str) -> tuple[int, ...]:
    """What llm-d's sidecar does: choose a data-parallel rank of prefill by header, and name its engine to decode."""
    transfer_id = f"xfer-{uuid.uuid4()}"
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    fetch = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": p.bootstrap_url,
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(_post, p.url, prompt, ask, {"X-data-parallel-rank": rank})
        answer = complete(d.url, prompt, kv_transfer_params=fetch)
        prefilled.result()
    return answer.token_ids


def _post(url: str, prompt: str, params: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.status == 200
