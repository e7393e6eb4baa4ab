"""Engines that span nodes, in vLLM's own words: each node is a process with an address of its own on this machine.

The workers of other nodes register with the first node's scheduler through vLLM, under that node's engine id, and peers
reach each at its own node's address. Tokens are compared with those of a plain engine.
"""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from devcluster.completions import CompletionError, complete_serially, get_text
from tests.support.engines import EnginePool, EngineSpec
from tests.support.pd_pair import PDPair, eventually, metric

pytestmark = pytest.mark.timeout(900)

PLAIN = EngineSpec()
#: Both roles span two nodes: KV leaves and enters each node's rank by itself.
PREFILL = EngineSpec(tensor=2, nodes=2, role="kv_producer")
DECODE = EngineSpec(tensor=2, dcp=2, interleave=8, nodes=2, role="kv_consumer")
PROMPTS = [("Two nodes share one engine. " * 30)[:length] + str(length) for length in (1, 15, 31, 64, 200, 400)]


def test_kv_moves_between_engines_that_span_nodes_and_a_lost_node_is_noticed(engine_pool: EnginePool) -> None:
    expected = engine_pool.answers(PLAIN, PROMPTS)
    prefill, decode = engine_pool.get(PREFILL, DECODE)
    try:
        pair = PDPair(prefill, decode)
        before = metric(decode, "bytes_received")
        for prompt, tokens in zip(PROMPTS[:3], expected, strict=False):
            assert complete_serially(prefill.url, decode.url, prompt).token_ids == tokens, prompt[-5:]
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(pair.concurrently, PROMPTS[3:]))
        assert [answer.token_ids for answer in answers] == expected[3:]
        pair.settled()
        assert metric(decode, "bytes_received") == metric(prefill, "bytes_sent") > before
        assert metric(decode, "failed_transfers") == metric(decode, "tokens_recomputed") == 0
        for engine in (prefill, decode):
            assert get_text(str(engine.bootstrap_url), "/healthz") == "ok\n"
        assert addresses(prefill.bootstrap_url) == {"0": "tcp://127.0.0.1", "1": "tcp://127.0.0.2"}
        # The probe of the first node's pod sees what happens on the other one.
        decode.others[0].signal(signal.SIGKILL)
        eventually(lambda: "rank tp 1 pp 0: doesn't answer at 127.0.0.2:" in health(decode.bootstrap_url))
    finally:
        engine_pool.stop(PREFILL, DECODE)


def addresses(bootstrap_url: str | None) -> dict[str, str]:
    """The host at which each tensor rank of a prefill engine is reached."""
    query: dict[str, Any] = json.loads(get_text(str(bootstrap_url), "/query"))
    return {tp: where["0"].rpartition(":")[0] for tp, where in query["0"]["worker_addr"].items()}


def health(bootstrap_url: str | None) -> str:
    """What /healthz says, whatever its status."""
    try:
        return get_text(str(bootstrap_url), "/healthz")
    except CompletionError as error:
        return str(error)
