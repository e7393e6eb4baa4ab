"""Pairs of real engines of different layouts: the tokens are those of an engine without P/D, and the counters agree.

Each pair is asked one prompt after another in the serial flow, then several at a time in the concurrent flow, then
prompts that meet what both engines have in their prefix caches by then (`prompts.pair_prompts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest

from devcluster.completions import Completion, get_text
from devcluster.deployments import Movement
from devcluster.metrics import total
from tests.support.engines import EnginePool, EngineSpec, RunningEngine
from tests.support.fleet import MAX_TOKENS, PAIRS, PairSpec, expected_answers
from tests.support.pd_pair import PDPair, eventually, metric, writes_by_path

pytestmark = pytest.mark.timeout(900)

#: Both tiny models: 4 layers; 32 values for K and 32 for V per head, float32.
BYTES_PER_HEAD = 4 * 64 * 4
KV_HEADS = {"tiny-mqa": 1, "tiny-gqa": 2}
AT_ONCE = 4


@dataclass(frozen=True)
class Run:
    """One pair that has answered all of its prompts."""

    spec: PairSpec
    pair: PDPair
    prompts: list[str]
    answers: list[Completion]
    expected: list[tuple[int, ...]]
    moved: Movement
    cached: Movement  # of that: what the prompts that meet filled caches caused
    written: dict[str, float]  # pulls that prefill served, by path
    failed: float  # transfers, on decode
    prefill_cached_tokens: float  # what it had in its prefix cache of the prompts that meet filled caches


@pytest.fixture(scope="module")
def known() -> dict[EngineSpec, dict[str, tuple[int, ...]]]:
    """Answers of the engines without P/D, by engine."""
    return {}


@pytest.fixture(scope="module")
def pool(engine_pool: EnginePool) -> Iterator[EnginePool]:
    """The session's engines. This module is the last user of those that it shares with test_engine_flows."""
    yield engine_pool
    engine_pool.stop()


@pytest.fixture(scope="module", params=PAIRS, ids=lambda spec: spec.name)
def run(pool: EnginePool, known: dict[EngineSpec, dict[str, tuple[int, ...]]], request: pytest.FixtureRequest) -> Run:
    spec: PairSpec = request.param
    if spec.plain not in known:
        known[spec.plain] = expected_answers(pool, spec.plain)
    pair = spec.start(pool)
    first, later = spec.prompts
    start, written = pair.movement(), writes_by_path(pair.prefill)
    # Another module may have let some fail on the same engine.
    failed_before = metric(pair.decode, "failed_transfers")
    answers = [pair.serially(prompt, MAX_TOKENS) for prompt in first[::2]]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers += threads.map(partial(pair.concurrently, max_tokens=MAX_TOKENS), first[1::2])
        between, cached_before = _counted(pair, start, len(first)), _cached_tokens(pair.prefill)
        flows = [pair.serially, pair.concurrently]
        asked = [threads.submit(flows[i % 2], prompt, MAX_TOKENS) for i, prompt in enumerate(later)]
        answers += [each.result() for each in asked]
    end = _counted(pair, start, len(first) + len(later))
    pair.settled()
    written = {path: count - written[path] for path, count in writes_by_path(pair.prefill).items()}
    failed = metric(pair.decode, "failed_transfers") - failed_before
    prefill_cached = _cached_tokens(pair.prefill) - cached_before
    prompts = [*first[::2], *first[1::2], *later]
    expected = [known[spec.plain][prompt] for prompt in prompts]
    return Run(spec, pair, prompts, answers, expected, end - start, end - between, written, failed, prefill_cached)


def _cached_tokens(engine: RunningEngine) -> float:
    """Prompt tokens that an engine has found in its own prefix cache."""
    return total(get_text(engine.url, "/metrics"), "vllm:prefix_cache_hits_total")


def _counted(pair: PDPair, start: Movement, requests: int) -> Movement:
    """Read the counters when they are complete."""

    def complete() -> bool:
        moved = pair.movement() - start
        return moved.decode_requests == requests and moved.sent_bytes == moved.received_bytes

    eventually(complete)
    return pair.movement()


def test_tokens_are_those_of_an_engine_without_pd(run: Run) -> None:
    differing = [
        f"{len(prompt)} tokens: {answer.token_ids} instead of {expected}"
        for prompt, answer, expected in zip(run.prompts, run.answers, run.expected, strict=True)
        if answer.token_ids != expected
    ]
    assert differing == []
    assert max(len(prompt) for prompt in run.prompts) == 700, "prompts are computed in several chunks"


def test_decode_computes_only_the_last_token_of_a_prompt(run: Run) -> None:
    # vLLM counts the last token as fetched where it was fetched, although it computes it again for its logits. It is
    # computed without a fetch for a prompt of one token, or one whose other tokens were in decode's cache.
    moved = run.moved
    assert moved.decode_computed_tokens <= len(run.prompts)
    counted = moved.decode_computed_tokens + moved.decode_cached_tokens + moved.decode_external_tokens
    assert counted == sum(len(prompt) for prompt in run.prompts)
    assert run.failed == 0


def test_bytes_on_both_sides_agree_with_the_tokens(run: Run) -> None:
    heads, decode = KV_HEADS[run.spec.decode.model], run.spec.decode
    ranks_per_head_and_shard = max(1, decode.tensor // (heads * decode.dcp))
    token_bytes = BYTES_PER_HEAD * heads * ranks_per_head_and_shard
    assert run.moved.received_tokens == run.moved.decode_external_tokens > 0
    assert run.moved.received_bytes == run.moved.received_tokens * token_bytes
    assert run.moved.sent_bytes == run.moved.received_bytes


def test_what_decode_has_cached_is_not_fetched_again(run: Run) -> None:
    _, later = run.spec.prompts
    virtual_block = run.spec.decode.block * run.spec.decode.dcp
    assert run.cached.decode_cached_tokens >= 4 * virtual_block
    assert run.cached.decode_cached_tokens % virtual_block == 0
    fetched = sum(len(prompt) for prompt in later) - run.cached.decode_cached_tokens
    assert run.cached.decode_external_tokens + run.cached.decode_computed_tokens == fetched
    # A prompt whose only missing token is the last: nothing is fetched, and prefill gets its blocks back.
    assert run.cached.decode_computed_tokens >= 1


def test_all_of_it_takes_the_path_that_prefill_was_told_or_chose(run: Run) -> None:
    assert {path for path, count in run.written.items() if count} == {run.spec.path}


def test_prefill_computes_nothing_again_that_it_has_cached(run: Run) -> None:
    virtual_block = run.spec.prefill.block * run.spec.prefill.dcp
    assert run.prefill_cached_tokens >= 4 * virtual_block
    assert run.prefill_cached_tokens % virtual_block == 0
