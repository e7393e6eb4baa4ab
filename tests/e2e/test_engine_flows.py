"""Two prefill and two decode engines of different layouts behind each kind of router: serial and concurrent flow.

vllm-router and the proxy that comes with Mooncake run here as they are. Of two others the requests are sent, see
`tests.support.proxies`. The serial flow in the cluster, with discovery, is in test_line. The engines here are those of
test_engine_pairs, which comes next and stops them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from devcluster.completions import complete, get_text
from devcluster.deployments import Movement, count_movement
from tests.support.engines import EnginePool, RunningEngine
from tests.support.fleet import (
    FLEET,
    FLOW_DECODES,
    FLOW_PREFILLS,
    MAX_TOKENS,
    PLAIN,
    expected_answers,
    flow_prompts,
)
from tests.support.pd_pair import eventually, metric, settled
from tests.support.proxies import ExampleProxy, Sidecar, mooncake_proxy, token_ids
from tests.support.real_checks import check_of
from tests.support.routers import running_router

pytestmark = pytest.mark.timeout(900)

FLOWS = (
    "vllm-router, serial",
    "vllm-router, concurrent",
    "Mooncake's proxy",
    "the requests of vLLM's example proxy",
    "the requests of llm-d's sidecar",
)
AT_ONCE = 4

#: Answers a prompt with the tokens that it got through a router.
Ask = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class Engines:
    """What stands behind the routers."""

    prefills: tuple[RunningEngine, ...]
    decodes: tuple[RunningEngine, ...]
    expected: dict[str, tuple[int, ...]]

    def pages(self) -> list[list[str]]:
        """The metrics pages of the prefill and of the decode engines."""
        return [[get_text(engine.url, "/metrics") for engine in role] for role in (self.prefills, self.decodes)]

    def settled(self, before: Movement, requests: int) -> Movement:
        """Return what happened since `before`, when all of it was counted."""

        def complete() -> bool:
            moved = count_movement(*self.pages()) - before
            return moved.decode_requests == requests and moved.sent_bytes == moved.received_bytes

        eventually(complete)
        moved = count_movement(*self.pages()) - before
        settled(*self.prefills, *self.decodes)
        return moved


@pytest.fixture(scope="module")
def engines(engine_pool: EnginePool) -> Engines:
    expected = expected_answers(engine_pool, PLAIN, FLOWS)
    engine_pool.get(*FLEET)
    running = engine_pool.get(*FLOW_PREFILLS, *FLOW_DECODES)
    return Engines(running[:2], running[2:], expected)


def request(prompt: str, *, stream: bool) -> dict[str, Any]:
    """What a client sends to a proxy."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


@contextmanager
def router(kv_connector: str, engines: Engines, folder: Path) -> Iterator[Ask]:
    with running_router(kv_connector, engines.prefills, engines.decodes, folder) as url:
        yield lambda prompt: complete(url, prompt, max_tokens=MAX_TOKENS).token_ids


@contextmanager
def proxy_of_mooncake(engines: Engines, folder: Path) -> Iterator[Ask]:
    with mooncake_proxy(engines.prefills, engines.decodes, folder) as url:
        yield lambda prompt: complete(url, prompt, max_tokens=MAX_TOKENS).token_ids


@contextmanager
def example_proxy(engines: Engines, folder: Path) -> Iterator[Ask]:
    known = [(engine.url, str(engine.bootstrap_url)) for engine in engines.prefills]
    with closing(ExampleProxy(known, [engine.url for engine in engines.decodes])) as proxy:
        yield lambda prompt: token_ids(proxy.ask(request(prompt, stream=len(prompt) % 2 == 0)))


@contextmanager
def sidecars(engines: Engines, folder: Path) -> Iterator[Ask]:
    """A sidecar beside each decode engine; here takes turns what llm-d's scheduler would choose."""
    ports = {_host_port(engine.url): int(str(engine.bootstrap_url).rpartition(":")[2]) for engine in engines.prefills}
    with closing(Sidecar(engines.decodes[0].url, ports)) as one, closing(Sidecar(engines.decodes[1].url, ports)) as two:
        turns = cycle([(sidecar, prefill) for sidecar in (one, two) for prefill in ports])

        def ask(prompt: str) -> tuple[int, ...]:
            sidecar, prefill = next(turns)
            return token_ids(sidecar.ask(request(prompt, stream=len(prompt) % 2 == 0), prefill))

        yield ask


ROUTERS = partial(router, "nixl"), partial(router, "mooncake")
WAYS = dict(zip(FLOWS, (*ROUTERS, proxy_of_mooncake, example_proxy, sidecars), strict=True))


@pytest.mark.parametrize("flow", FLOWS)
def test_tokens_are_right_and_every_engine_takes_part(engines: Engines, flow: str, tmp_path: Path) -> None:
    prompts = flow_prompts(flow)
    missing = [metric(engine, "failed_transfers", 'reason="params_missing"') for engine in engines.decodes]
    pages = engines.pages()
    with WAYS[flow](engines=engines, folder=tmp_path) as ask, ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(ask, prompts))
    assert answers == [engines.expected[prompt] for prompt in prompts]
    moved = engines.settled(count_movement(*pages), len(prompts))
    assert moved.sent_bytes == moved.received_bytes > 0
    # Prompts share nothing, so all of their tokens were fetched, except that of the prompt that has only one.
    assert moved.received_tokens == moved.decode_external_tokens == sum(map(len, prompts)) - 1
    assert moved.decode_computed_tokens == 1
    after = engines.pages()
    for number in range(2):
        prefill = count_movement([after[0][number]], []) - count_movement([pages[0][number]], [])
        assert prefill.sent_bytes > 0, f"prefill engine {number} was not used"
        decode = count_movement([], [after[1][number]]) - count_movement([], [pages[1][number]])
        assert decode.received_tokens > 0, f"decode engine {number} was not used"
    assert missing == [metric(engine, "failed_transfers", 'reason="params_missing"') for engine in engines.decodes]


def test_the_operators_check_verifies_real_engines_and_notices_a_router_that_hands_nothing_over(
    engines: Engines, tmp_path: Path
) -> None:
    with running_router("nixl", engines.prefills, engines.decodes, tmp_path) as url:
        found = check_of(engines.prefills, engines.decodes, url)
    assert (found.said.status, found.said.reason) == ("True", "Verified"), found.said.message
    # Sent to decode itself, the prompt is answered without a remote prefill.
    found = check_of(engines.prefills, engines.decodes, engines.decodes[1].url)
    assert (found.said.status, found.said.reason) == ("False", "Recomputed"), found.said.message
    assert "params_missing" in found.said.message


def test_query_can_be_read_as_each_proxy_reads_it(engines: Engines) -> None:
    for engine in engines.prefills:
        answer = json.loads(get_text(str(engine.bootstrap_url), "/query"))
        # All take every key at the top for a data-parallel rank: a number in decimal, whose value is an object with
        # an engine id that is a string. vLLM's own connector reads the addresses, by tensor and pipeline rank.
        assert list(answer) == ["0"]
        assert set(answer["0"]) == {"engine_id", "worker_addr"}
        assert isinstance(answer["0"]["engine_id"], str)
        by_rank = {rank: list(stages) for rank, stages in answer["0"]["worker_addr"].items()}
        assert by_rank == {str(rank): ["0"] for rank in range(engine.spec.tensor)}


def _host_port(url: str) -> str:
    return url.removeprefix("http://")
